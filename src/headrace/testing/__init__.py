"""Fakes for tests: every component of a run, in virtual time, with the same contracts as the real ones."""

from headrace.testing.fakes import FakeEngine, FakeLearner, FakeScorer, fake_parts, lognormal_lengths

__all__ = ["FakeEngine", "FakeLearner", "FakeScorer", "fake_parts", "lognormal_lengths"]
