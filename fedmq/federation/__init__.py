"""What a federated method is, which silo holds what, and which faults strike when."""
