"""The auxiliary models beside the trained model: a reference, a teacher, a kept π_old, a critic."""
