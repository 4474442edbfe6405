"""How Sidegate's daemons find and talk to each other.

Empty until daemons are linked; sidecar may import it, never the reverse.
"""
