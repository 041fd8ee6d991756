"""Worlds: the ranks of a program, who makes their communicators, and what becomes of them when some are lost."""
