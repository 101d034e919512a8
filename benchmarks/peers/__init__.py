"""What each contender's user would write, as a step that can be timed; one kind a file."""
