"""The op families: one file or folder each, with the same five names in each."""
