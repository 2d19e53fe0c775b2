"""The mathematics: pure functions, one file per formula."""
