"""What passes between processes: messages, frames, keys, sessions, transports, message logs."""
