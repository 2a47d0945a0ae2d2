"""What decides which KV vectors move, and when. Policies do no I/O."""
