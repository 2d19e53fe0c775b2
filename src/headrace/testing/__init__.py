"""Fakes for tests of the controller: engine, learner and scorer in virtual time, with the same contracts as the real
components.

The folder also contains contract suites that a test can run against an engine, a transport of weights or a ledger, and
fake vLLM and SGLang servers.
"""

from headrace.testing.fakes import FakeEngine, FakeLearner, FakeScorer, fake_parts, lognormal_lengths

__all__ = ["FakeEngine", "FakeLearner", "FakeScorer", "fake_parts", "lognormal_lengths"]
