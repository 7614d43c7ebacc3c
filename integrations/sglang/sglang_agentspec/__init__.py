"""The SGLang plugin: speculative algorithm AGENTSPEC in SGLang's own scheduler.

SGLang finds it by the entry point group `sglang.srt.plugins` once the package is installed beside it:

    sglang serve --model-path ... --speculative-algorithm AGENTSPEC

Works with SGLang 0.5.23 and no other version: it relies on that version's internals (internals.py), and
where it finds another it registers an AGENTSPEC that refuses to start and says so. Settings: settings.py.
What a request may
say: requests.py. Why it is right on GPUs: DESIGN.md.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_agentspec.diagnosis import ALGORITHM, SUPPORTED_SGLANG, installed_sglang

__all__ = ["ALGORITHM", "SUPPORTED_SGLANG", "register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """SGLang's plugin hook: make AGENTSPEC known in this process. Never raises, since SGLang would only log
    it."""
    version = installed_sglang()
    if version != SUPPORTED_SGLANG:
        _register_refusal(f"needed SGLang {SUPPORTED_SGLANG}, found {version}: pip install sglang=={SUPPORTED_SGLANG}")
        return
    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from sglang_agentspec.internals import AgentSpecAlgorithm

        @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=AgentSpecAlgorithm)
        def worker(server_args: Any) -> type:
            from sglang_agentspec.internals import AgentSpecWorker

            return AgentSpecWorker

    except Exception as error:
        logger.exception("AGENTSPEC could not be registered")
        _register_refusal(f"could not be registered: {error!r}")


def _register_refusal(reason: str) -> None:
    """An AGENTSPEC that refuses to start with the reason; without it SGLang says only that it knows no such
    name."""
    from agentspec.errors import UnsupportedModelError

    logger.error("AGENTSPEC is not available: %s", reason)

    def refuse(server_args: Any) -> None:
        raise UnsupportedModelError(f"AGENTSPEC is not available: {reason}")

    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, validate_server_args=refuse)
        def worker(server_args: Any) -> type:
            refuse(server_args)
            raise AssertionError("unreachable")

    except Exception:
        logger.exception(
            "AGENTSPEC: this SGLang lets no algorithm be registered; --speculative-algorithm AGENTSPEC fails"
        )
