"""The auxiliary models of a learner, which compute columns of a batch beside the trained model: a reference, a teacher,
a kept π_old, a critic."""
