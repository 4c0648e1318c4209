"""Short runs of the state machine; ``make verify`` runs 500 sequences."""

from hypothesis import settings

from tests.swap_machine import SwapMachine

TestSwaps = SwapMachine.TestCase
TestSwaps.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
