"""Worlds: the ranks of a program, how their communicators are made, and how they recover when ranks are lost."""
