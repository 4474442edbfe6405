"""Where the set of members comes from: one file a source, each imported only when it is chosen."""
