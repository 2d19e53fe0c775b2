"""What stands beside the model in training: a reference, a teacher, a kept π_old, a critic."""
