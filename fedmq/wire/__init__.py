"""Communication between processes: messages, frames, keys, sessions, transports, message logs."""
