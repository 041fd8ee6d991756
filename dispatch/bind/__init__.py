"""From a request to what runs: the row, the plan, prepared calls and their refits."""
