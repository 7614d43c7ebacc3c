"""Everything of the plugin that touches SGLang's internals, as they are in 0.5.23: the algorithm and its
worker.

Imported by SGLang's processes only, after __init__.register() has checked the version. DESIGN.md beside this
file argues why it is right on GPUs. References below are to files under `sglang/srt`.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult, is_health_check_generate_req
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.observability.req_time_stats import set_time_batch
from sglang.srt.runtime_context import attn_dp_enabled_of, get_context, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_utils import eagle_sample
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    GrammarTree,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    move_accept_tokens_to_target_kvcache,
    prepare_mamba_track_for_verify,
    record_stream_for_v2_verify,
)
from sglang.srt.utils import is_cpu, is_hip, is_xpu

from agentspec.errors import IntegrityError, InvalidRequestError
from sglang_agentspec.backends import tree_width
from sglang_agentspec.drafter import Call, Drafter, Step
from sglang_agentspec.lossless import needs_plain_batch, reason_not_to_draft
from sglang_agentspec.requests import read_settings
from sglang_agentspec.settings import PluginSettings
from sglang_agentspec.tree import places_in_full_mask

__all__ = ["AgentSpecAlgorithm", "AgentSpecWorker"]

logger = logging.getLogger(__name__)

DEFAULT_WIDTH = 16
# Verification takes the argmax on these, whatever the temperature
# (speculative/eagle_utils.py::_verify_uses_greedy).
_GREEDY_VERIFIER = is_cpu() or is_xpu() or is_hip()


class AgentSpecAlgorithm(CustomSpecAlgo):
    """AGENTSPEC takes NGRAM's place wherever the scheduler and the model runner ask: the relay of accepted
    tokens, the verify input, no draft KV (speculative/spec_info.py)."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    # What the enum has and CustomSpecAlgo lacks.
    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, args: Any) -> None:
        """Every check of `arg_groups/speculative_hook.py::_handle_ngram`, and ours. Assignments are
        recorded."""
        settings = PluginSettings.from_environment()
        if args.device not in ("cuda", "cpu", "xpu"):
            raise InvalidRequestError(f"AGENTSPEC: needed --device cuda, cpu or xpu, got {args.device}")
        if attn_dp_enabled_of(args):
            raise InvalidRequestError(
                "AGENTSPEC: SGLang's n-gram verification doesn't support DP attention: leave --enable-dp-attention out"
            )
        if args.pp_size > 1:
            raise InvalidRequestError(
                "AGENTSPEC: SGLang relays no n-gram drafts between pipeline stages: leave --pp-size at 1"
            )
        for name in ("enable_two_batch_overlap", "enable_pdmux"):
            if getattr(args, name):
                option = "--" + name.replace("_", "-")
                raise InvalidRequestError(
                    f"AGENTSPEC: {option} keeps attention backends of its own, which a step of another width "
                    "can't exchange: leave it out"
                )
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
            if getattr(args, name) != 1.0:
                option = "--" + name.replace("_", "-")
                raise InvalidRequestError(f"AGENTSPEC: {option} below 1 changes what the model says: leave it out")
        if SIMULATE_ACC_LEN > 0:
            raise InvalidRequestError("AGENTSPEC: SGLANG_SIMULATE_ACC_LEN invents tokens: unset it")
        if args.speculative_ngram_external_corpus_path is not None:
            raise InvalidRequestError(
                "AGENTSPEC: --speculative-ngram-external-corpus-path belongs to NGRAM: send seeds with a request"
            )
        if args.speculative_num_draft_tokens is None:
            args.speculative_num_draft_tokens = DEFAULT_WIDTH
        if args.speculative_num_draft_tokens < 2:
            raise InvalidRequestError(
                "AGENTSPEC: --speculative-num-draft-tokens counts the last token too, so it has to be 2 at "
                f"least, got {args.speculative_num_draft_tokens}"
            )
        settings.verify_widths(args.speculative_num_draft_tokens)
        if args.device == "cpu" and not settings.cpu_overlap:
            args.disable_overlap_schedule = True
        if args.max_running_requests is None:
            args.max_running_requests = 48
        args.enable_mixed_chunk = False
        args.speculative_eagle_topk = tree_width(
            settings.trees,
            attention=args.attention_backend,
            prefill=args.prefill_attention_backend,
            decode=args.decode_attention_backend,
            verify_on_prefill=args.speculative_attention_mode == "prefill",
            page_size=args.page_size or 1,
        )
        if args.speculative_num_steps is None:
            # Only the KV reserve reads it (mem_cache/allocation_sizing.py): steps * topk <= draft tokens.
            args.speculative_num_steps = max(1, args.speculative_num_draft_tokens // args.speculative_eagle_topk)


@dataclass(slots=True)
class _Runners:
    """What has to be active together for steps of one verify width (model_executor/model_runner.py)."""

    attention: Any
    graph: Any


class AgentSpecWorker(BaseSpecWorker):
    """One tensor-parallel rank's worker; the counterpart of `speculative/ngram_worker.py::NGRAMWorker`."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = self.model_runner.device
        self.enable_overlap = not get_schedule().disable_overlap_schedule
        self.speculative_num_draft_tokens = get_spec().speculative_num_draft_tokens
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.topk = get_spec().speculative_eagle_topk
        self.settings = PluginSettings.from_environment()
        self.calls: dict[str, Call] = {}
        self._requests: dict[str, Any] = {}
        self._last_seen: dict[str, int] = {}
        self._decoding: set[str] = set()
        self._forwards = 0
        self._runners: dict[int, _Runners] = {}
        self._active = 0

    # ---- what the scheduler calls once ------------------------------------------------------------

    @property
    def draft_worker(self) -> None:
        return None  # no draft model

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
        self.drafter = Drafter(
            self.settings,
            vocabulary=self.model_runner.model_config.vocab_size,
            curve=self.settings.curve(torch.device(self.device).type),
            widest=self.speculative_num_draft_tokens,
            max_rows=self.model_runner.max_running_requests,
            trees=self.topk > 1,
            tokenizer=getattr(self._target_worker, "tokenizer", None),
        )
        self.drafter.warm_up()  # numba, before the server says that it is ready

    def init_cuda_graphs(self) -> None:
        """Attention backend and decode graphs for each verify width, and for plain decoding.

        After `eagle_worker_v2.py::build_adaptive_runtime_state`: backends size their metadata when they are
        made, graphs are captured for one width, and both are swapped together.
        """
        super().init_cuda_graphs()
        runner = self.model_runner
        widest = self.speculative_num_draft_tokens
        self._runners[widest] = _Runners(runner.attn_backend, runner.decode_cuda_graph_runner)
        self._active = widest
        for width in self.drafter.widths:
            if width != widest:
                self._runners[width] = self._build_runners(width)
        if not self._keeps_states():
            self._runners[1] = self._build_runners(1)
        self._activate(widest)
        logger.info(
            "AGENTSPEC ready: proposer %s, %s, verify widths %s, plain steps %s, %s scheduling, "
            "up to %.0f MB of memory, v(n): %s",
            self.drafter.proposer.name,
            "trees" if self.topk > 1 else "chains",
            self.drafter.widths,
            "decode" if 1 in self._runners else f"verify at width {self.drafter.widths[0]}",
            "overlap" if self.enable_overlap else "synchronous",
            self.settings.memory_mb,
            self.drafter.curve.name,
        )

    def clear_cache_pool(self) -> None:
        """SGLang's flush_cache: what trajectories remember goes with the KV cache."""
        for rid in list(self.calls):
            self._end(rid)
        self.drafter.clear()
        self._decoding = set()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if rid in self.calls:
            self._end(rid)

    # ---- a forward --------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        self._forwards += 1
        if not batch.forward_mode.is_decode():
            return self._prefill(batch, on_publish, pp_proxy_tensors)
        stream = torch.get_device_module(self.device).current_stream()
        record_stream_for_v2_verify(batch, None, stream)
        set_time_batch(batch.reqs, "set_spec_draft_start_time", trace_only=True)
        calls = self._settle(batch)
        step = self.drafter.draft(calls, plain=any(needs_plain_batch(r) for r in batch.reqs))
        set_time_batch(batch.reqs, "set_spec_draft_end_time", trace_only=True)
        if step.width == 1 and 1 in self._runners:
            return self._plain(batch, calls, on_publish)
        return self._verify(batch, calls, step, on_publish, pp_proxy_tensors)

    def _prefill(self, batch: ScheduleBatch, on_publish: Any, pp_proxy_tensors: Any) -> GenerationBatchResult:
        """An extend (or idle) batch: the plain forward; its prompts are indexed once it is launched."""
        self._activate(self.speculative_num_draft_tokens)
        result = self.target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)
        rows = len(batch.reqs)
        tokens = result.next_token_ids
        accept_lens = torch.ones(rows, dtype=torch.int32, device=self.device)
        if on_publish is not None:
            on_publish(batch.seq_lens.clone())
        self._sweep()  # first, so that a call that has ended in its prefill can be joined by its next one
        for request in batch.reqs:
            if request.rid not in self.calls:
                self._begin(request)
            self._last_seen[request.rid] = self._forwards
        return self._result(
            batch,
            result,
            tokens,
            self._spread(tokens, rows, 1),
            accept_lens,
            batch.seq_lens.clone(),
            width=None,
        )

    def _plain(self, batch: ScheduleBatch, calls: list[Call], on_publish: Any) -> GenerationBatchResult:
        """Nothing to verify: an ordinary decode step, as a server without speculation runs it."""
        self._activate(1)
        rows = len(batch.reqs)
        seq_lens = batch.seq_lens
        last = torch.tensor([call.context.tokens[-1] for call in calls], dtype=torch.int64)
        batch.input_ids = self._to_device(last)
        batch.out_cache_loc = self._slots(batch, 1)
        batch.seq_lens = seq_lens + 1
        batch.seq_lens_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + 1
        batch.seq_lens_sum = None
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        batch.spec_info = None
        result = self.target_worker.forward_batch_generation(batch)
        self.drafter.learn(calls)
        tokens = result.next_token_ids
        if batch.return_logprob:  # speculation's layout is [rows, tokens a step]
            result.logits_output.next_token_logprobs = result.logits_output.next_token_logprobs.view(rows, 1)
        new_seq_lens = seq_lens + 1
        if on_publish is not None:
            on_publish(new_seq_lens)
        accept_lens = torch.ones(rows, dtype=torch.int32, device=self.device)
        out = self._result(batch, result, tokens, self._spread(tokens, rows, 1), accept_lens, new_seq_lens, width=1)
        out.cap_lens = torch.ones(rows, dtype=torch.int32, device=self.device)
        return out

    def _verify(
        self, batch: ScheduleBatch, calls: list[Call], step: Step, on_publish: Any, pp_proxy_tensors: Any
    ) -> GenerationBatchResult:
        """One forward over all drafts; the accepted path is kept (speculative/ngram_worker.py)."""
        width = max(step.width, self.drafter.widths[0])
        if step.width == 1:  # a model whose state only the verify path keeps
            self.drafter.pack_roots(calls, width)
        tree = self.drafter.tree
        self._activate(width)
        rows = len(batch.reqs)
        seq_lens = batch.seq_lens
        nodes = self._to_device(torch.from_numpy(tree.nodes.copy()))
        verify = NgramVerifyInput(
            draft_token=nodes[0],
            custom_mask=self._mask(batch, torch.from_numpy(tree.mask.copy())),
            positions=(nodes[3].view(rows, width) + seq_lens.view(rows, 1)).flatten(),
            retrieve_index=torch.arange(rows * width, dtype=torch.int64, device=self.device).view(rows, width),
            retrieve_next_token=nodes[1].view(rows, width),
            retrieve_next_sibling=nodes[2].view(rows, width),
            draft_token_num=width,
        )
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = verify.draft_token
        batch.out_cache_loc = self._slots(batch, width)
        prepare_mamba_track_for_verify(batch)
        batch.spec_info = verify
        result = self.target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors, is_verify=True)
        self.drafter.learn(calls)
        grammar = self._grammar_mask(batch, tree) if batch.has_grammar else None
        plain = [row for row, call in enumerate(calls) if call.reason is not None]
        sampled = self._sample_plainly(batch, result.logits_output, rows, width) if plain else None
        watermark = self.model_runner.watermark_state
        predict, accept_lens, accept_index = eagle_sample(
            verify, batch, result.logits_output, grammar, watermark_state=watermark
        )
        if sampled is not None:  # their roots have no children: nothing was accepted, only the token is replaced
            at = torch.tensor(plain, dtype=torch.int64, device=self.device)
            predict[at * width] = sampled[at].to(predict.dtype)
        new_seq_lens = seq_lens + accept_lens
        commit_mamba_states_after_verify(self.target_worker, batch, accept_lens, accept_index, width)
        accepted = predict[accept_index]
        if watermark is not None and batch.sampling_info.has_watermark_candidates:
            watermark.append_speculative(batch.req_pool_indices, accepted, accept_lens)
        move_accept_tokens_to_target_kvcache(batch, accept_index, accept_lens - 1, self.token_to_kv_pool_allocator)
        if batch.return_logprob:
            compute_spec_logprobs(batch, result.logits_output, predict, accept_index=accept_index)
        if on_publish is not None:
            on_publish(new_seq_lens)
        tokens = accepted.flatten()
        batch.forward_mode = ForwardMode.DECODE
        out = self._result(
            batch, result, tokens, self._spread(tokens, rows, width), accept_lens, new_seq_lens, width=width
        )
        out.cap_lens = torch.tensor(step.lengths, dtype=torch.int32).to(self.device, non_blocking=True)
        return out

    def _result(
        self,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
        tokens: torch.Tensor,
        relayed: torch.Tensor,
        accept_lens: torch.Tensor,
        new_seq_lens: torch.Tensor,
        width: int | None,
    ) -> GenerationBatchResult:
        """width: columns of `tokens`. What is relayed to the next step keeps one fixed stride, the widest."""
        stride = self.speculative_num_draft_tokens
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=accept_lens,
            new_seq_lens=new_seq_lens,
            next_draft_input=NgramVerifyInput(
                draft_token_num=stride,
                new_seq_lens=new_seq_lens,
                accept_tokens=relayed,
                accept_lens=accept_lens,
            ),
            speculative_num_draft_tokens=stride if width is None else width,
            expert_distribution_metrics=result.expert_distribution_metrics,
            routed_experts_output=result.routed_experts_output,
            indexer_topk_output=result.indexer_topk_output,
        )

    # ---- calls ------------------------------------------------------------------------------------

    def _begin(self, request: Any) -> Call:
        """First sight of a request: index its whole prompt, and tell its response what will be done for
        it."""
        prompt = np.array(request.origin_input_ids_unpadded, dtype=np.int32)
        settings = read_settings(request, len(prompt), self.drafter.vocabulary)
        most, ends = request.sampling_params.max_new_tokens, _ends(request)
        if is_health_check_generate_req(request):  # load balancers ask every few seconds
            call = self.drafter.begin_unseen(prompt, most, ends, "health_check")
        else:
            reason = reason_not_to_draft(request, _GREEDY_VERIFIER) if settings.draft else "switched_off"
            call = self.drafter.begin(settings, prompt, max_output=most, ends=ends, reason=reason)
        # One entry, at the first output token: it is sent once
        # (managers/scheduler_components/output_streamer.py).
        told = {
            "drafts": call.reason is None,
            "trajectory": call.trajectory.id,
            "joined_by": settings.joined_by,
            "held_tokens": int(call.context.held),
        }
        if call.reason is not None:
            told["reason"] = call.reason
        if call.problems:
            told["problems"] = list(call.problems)
        if request.customized_info is None:
            request.customized_info = {}
        request.customized_info["agentspec"] = [told]
        self.calls[request.rid] = call
        self._requests[request.rid] = request
        return call

    def _settle(self, batch: ScheduleBatch) -> list[Call]:
        """Bring each call's memory up to the tokens that came, and close those that left the batch.

        Under overlap scheduling a step's result may not be processed yet: its tokens are in spec_info, not in
        output_ids. They may also be in both, where a prefill ran in between. The sequence length says which:
        it counts all tokens but the last.
        """
        lengths = batch.seq_lens_cpu.tolist()
        relayed: list[list[int]] | None = None
        if self.enable_overlap and not batch.grammar_needs_sync():
            lens = batch.spec_info.accept_lens.tolist()
            tokens = batch.spec_info.accept_tokens.view(len(lens), -1)[:, : max(lens, default=0)].tolist()
            relayed = [row[:n] for row, n in zip(tokens, lens, strict=True)]
        calls = []
        for row, request in enumerate(batch.reqs):
            call = self.calls.get(request.rid)
            if call is None:
                call = self._begin(request)
            known = len(request.output_ids)
            total = lengths[row] + 1 - len(request.origin_input_ids)
            if total < call.taken:
                # The scheduler took output back (a request restarted from its prompt): so does its memory.
                self._end(request.rid, aborted=True)
                call = self._begin(request)
            new = list(request.output_ids[call.taken : min(known, total)])
            missing = total - max(known, call.taken)
            if missing > 0:
                if relayed is None or missing > len(relayed[row]):
                    raise IntegrityError(
                        f"request {request.rid}: {total} output tokens by its length, {known} known, "
                        f"{0 if relayed is None else len(relayed[row])} relayed"
                    )
                new += relayed[row][-missing:]
            if new:
                self.drafter.take(call, new)
            calls.append(call)
        running = {request.rid for request in batch.reqs}
        for rid in self._decoding - running:
            if rid in self.calls and self._requests[rid].finished():
                self._end(rid)
        self._decoding = running
        for rid in running:
            self._last_seen[rid] = self._forwards
        return calls

    def _end(self, rid: str, aborted: bool = False) -> None:
        call = self.calls.pop(rid)
        request = self._requests.pop(rid)
        self._last_seen.pop(rid, None)
        delivered = None if aborted else list(request.output_ids_through_stop)
        self.drafter.end(call, delivered)

    def _sweep(self) -> None:
        """Close calls whose end nobody reported: finished in their prefill, or aborted while they waited.

        Called at prefills only. The second kind is known by its long absence, counted in forwards: alike on
        all ranks. Should one come back after all, it begins anew.
        """
        for rid in list(self.calls):
            if self._requests[rid].finished():
                self._end(rid)
            elif self._forwards - self._last_seen.get(rid, 0) > 10_000:
                self._end(rid, aborted=True)

    # ---- tensors ----------------------------------------------------------------------------------

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        if host.device.type == torch.device(self.device).type:
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def _slots(self, batch: ScheduleBatch, width: int) -> torch.Tensor:
        """The KV slots behind each request's tokens, reserved by
        `eagle_utils.py::eagle_prepare_for_decode`."""
        return assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=batch.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + width,
            batch_size=len(batch.reqs),
            draft_token_num=width,
            device=self.device,
        )

    def _mask(self, batch: ScheduleBatch, tree: torch.Tensor) -> torch.Tensor:
        """CPU: the drafts' own mask. GPU: for each request [width, seq_len + width], flattened, one after
        another.

        One host pass over the rows' lengths, two kernels, whatever the batch (stock NGRAM runs three a
        request).
        """
        width = tree.shape[1]
        if is_cpu():
            return tree.flatten()
        places, total = places_in_full_mask(batch.seq_lens_cpu.numpy().astype(np.int64), width)
        mask = torch.ones(total, dtype=torch.bool, device=self.device)
        mask[self._to_device(torch.from_numpy(places))] = self._to_device(tree.flatten())
        return mask

    def _spread(self, tokens: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """tokens[rows * width] in rows of the widest step, flattened: the relay's fixed stride."""
        stride = self.speculative_num_draft_tokens
        if width == stride:
            return tokens
        relayed = torch.zeros(rows, stride, dtype=torch.int32, device=self.device)
        relayed[:, :width] = tokens.view(rows, width)
        return relayed.flatten()

    def _grammar_mask(self, batch: ScheduleBatch, tree: Any) -> Any:
        host = (torch.from_numpy(a.copy()) for a in (tree.next_token, tree.next_sibling, tree.tokens))
        return build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=GrammarTree.from_host(*host),
            sampling_info=batch.sampling_info,
            device=torch.device(self.device),
            barrier=None,
        )

    def _sample_plainly(
        self, batch: ScheduleBatch, logits_output: LogitsProcessorOutput, rows: int, width: int
    ) -> torch.Tensor:
        """int[rows]: SGLang's ordinary sampler on the roots' logits, before the verifier changes them in
        place."""
        roots = logits_output.next_token_logits.view(rows, width, -1)[:, 0].clone()
        output = LogitsProcessorOutput(next_token_logits=roots)
        info = batch.sampling_info
        self.model_runner._preprocess_logits(output, info)
        return self.model_runner.sampler(output, info, False, [], [], batch.seq_lens)

    # ---- runners by width -------------------------------------------------------------------------

    def _keeps_states(self) -> bool:
        """Models with recurrent state: plain steps go through the verify path too, which alone is known to
        commit that state under speculation (spec_utils.py::commit_mamba_states_after_verify)."""
        from sglang.srt.configs.hybrid_arch import mambaish_config

        return mambaish_config(self.model_runner.model_config) is not None

    def _activate(self, width: int) -> None:
        if width == self._active:
            return
        runners = self._runners[width]
        self.model_runner.attn_backend = runners.attention
        self.model_runner.decode_cuda_graph_runner = runners.graph
        self._active = width

    def _build_runners(self, width: int) -> _Runners:
        """width 1: a plain decode step, built as if there were no speculation."""
        from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend

        runner = self.model_runner
        algorithm = runner.spec_algorithm
        with self._configured(width):
            before = runner.init_new_workspace
            try:
                if width == 1:
                    runner.spec_algorithm = SpeculativeAlgorithm.NONE
                attention = runner._get_attention_backend(init_new_workspace=True)
                graph = self._runners[self.speculative_num_draft_tokens].graph
                captured = graph is not None and graph is not runner.eager_runner
                if captured and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
                    graph = runner._decode_cuda_graph_runner_cls()(
                        runner,
                        attn_backend=attention,
                        speculative_num_steps=self.speculative_num_steps,
                        speculative_num_draft_tokens=width,
                    )
            finally:
                runner.spec_algorithm = algorithm
                runner.init_new_workspace = before
        return _Runners(attention, graph)

    @contextlib.contextmanager
    def _configured(self, width: int) -> Any:
        """SGLang's configuration while backends and graphs for `width` are made."""
        before = get_spec().speculative_num_draft_tokens
        get_context().override("agentspec.width", speculative_num_draft_tokens=width)
        try:
            yield
        finally:
            get_context().override("agentspec.width", speculative_num_draft_tokens=before)


def _ends(request: Any) -> frozenset[int]:
    """Ids that end the output (managers/schedule_batch.py::_check_token_based_finish)."""
    params = request.sampling_params
    if params.ignore_eos:
        return frozenset()
    ends = set(params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    tokenizer = request.tokenizer
    if tokenizer is not None:
        if tokenizer.eos_token_id is not None:
            ends.add(tokenizer.eos_token_id)
        ends.update(getattr(tokenizer, "additional_stop_token_ids", None) or ())
    return frozenset(ends)
