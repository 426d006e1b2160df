"""What a stack says and writes, as frames: recording it into captures, and reading captures."""
