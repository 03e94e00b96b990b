"""`make mutants`: plant one fault at a time in a copy of the tree and show that the named test fails.

Each entry: a name, the file, text that occurs there exactly once, what replaces it, and the test that must fail. The
tests are first run on an unchanged copy, where they must pass. Exit 1 if any fault is missed.

    python tests/mutants.py [words]      only entries whose name contains one of the words
"""

import ast
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
TREE = ("dflash", "data_prep", "train", "tests", "configs", "pyproject.toml")


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    test: str


BLOCKS, OBJECTIVE, MODEL, GENERATE = (f"dflash/{name}.py" for name in ("blocks", "objective", "model", "generate"))
MASK = "test_blocks.py::test_block_mask_is_the_dense_mask"
MADE = "test_blocks.py::test_make_blocks"
LOSS = "test_objective.py::test_block_loss_is_the_double_loop"
OTHER = "test_objective.py::test_other_objectives_are_their_double_loops"
CAUSAL = "test_model.py::test_context_is_causal_and_of_one_document"
FORMULA = "test_model.py::test_drafter_is_zlabs_formula"
SERVE = "test_model.py::test_training_forward_is_the_decoder_with_its_cache"
CHI = "test_generate.py::test_acceptance_keeps_the_targets_distribution"
SEES = "test_generate.py::test_the_drafter_sees_all_verified_text"
BATCH = "test_generate.py::test_batched_equals_single"
DRAFTS = "test_generate.py::test_a_batch_is_drafted_as_single_runs_are"

BASELINE = "dflash/baselines.py"
UNROLLED = "test_baselines.py::test_unrolled_training_is_the_reference"
PATTERNS = "test_metrics.py::test_known_patterns_give_known_figures_for_every_batching_and_number_of_ranks"
DRAFTED = "test_baselines.py::test_serving_is_the_reference"

SERVER, AT_SERVER = "train/server.py", "train/evaluate_server.py"
DATA, ENGINE, TRAINER, EVALUATE, EXPORT, CHECKPOINT, VERIFY, DIAGNOSE, PUBLISH = (
    f"train/{n}.py"
    for n in ("data", "engine", "trainer", "evaluate", "export", "checkpoint", "verify", "diagnose", "publish")
)
ENCODE, STORE, CACHE, REGENERATE, PREPARE, PROMPTS, CODEC, AUDIT, FILES = (
    f"data_prep/{n}.py"
    for n in ("encode", "store", "cache", "regenerate", "prepare", "prompts", "codec", "audit", "files")
)
SAME = "test_data.py::test_a_step_is_the_same_for_every_number_of_ranks_and_every_budget"
ADAMW = "test_engine.py::test_three_steps_are_adamw_with_clipping_and_no_decay_of_norms"
RESUME = "test_resume.py::test_killed_and_resumed_equals_uninterrupted"
WALK = "test_metrics.py::test_walk_equals_a_simulated_decode"
TURNS = "test_encode.py::test_end_of_turn_is_supervised_and_nothing_behind_it"
CLAIMS = "test_store.py::test_claims_of_the_living_are_left_and_those_of_the_dead_are_void"
DAMAGE = "test_store.py::test_damage_is_named_and_made_good"
HELDOUT = "test_prompts.py::test_the_held_out_prompts_are_the_same_whatever_the_order_size_and_ids"

MUTANTS = [
    # blocks and mask
    Mutant("label shifted by one", BLOCKS, "label_AS=ids_T[token_AS]", "label_AS=ids_T[token_AS - 1]", MADE),
    Mutant("the anchor's feature is visible", BLOCKS, "(key < anchor_A[block])", "(key <= anchor_A[block])", CAUSAL),
    Mutant("mask: <= for <", BLOCKS, "(key < anchor_A[block])", "(key <= anchor_A[block])", MASK),
    Mutant("mask: other documents are visible", BLOCKS, "(key >= start_A[block]) & (key", "(key >= 0) & (key", MASK),
    Mutant(
        "mask: a block sees the others, not itself", BLOCKS, "// block_size == block)", "// block_size != block)",
        "test_model.py::test_blocks_do_not_see_each_other",
    ),
    Mutant(
        "mask: causal inside the block", BLOCKS, "// block_size == block)",
        "// block_size == block) & (key - num_context <= query)", "test_model.py::test_block_is_bidirectional",
    ),
    Mutant(
        "positions run through the bin", BLOCKS, "position_AS=(anchor_A - start_A)", "position_AS=(anchor_A)", MADE
    ),
    Mutant("learning goes on behind a gap", BLOCKS, "learned_AS.cumprod(dim=1)", "learned_AS.long()", MADE),
    Mutant("the last token is lost", BLOCKS, "token_AS < end_A[:, None]", "token_AS + 1 < end_A[:, None]", MADE),
    Mutant("blocks learn the next document", BLOCKS, "token_AS < end_A[:, None]", "token_AS <= end_A[:, None]", MADE),
    Mutant(
        "decay off by one", BLOCKS, "torch.exp(-(slot_S - 1) / gamma)", "torch.exp(-slot_S / gamma)",
        "test_blocks.py::test_decay_weights_golden",
    ),
    Mutant(
        "an anchor needs no label behind it", BLOCKS, "(loss_mask_T[:-1] & loss_mask_T[1:])", "loss_mask_T[:-1]",
        "test_blocks.py::test_eligible_and_sampled_anchors",
    ),
    Mutant(
        "anchors with replacement", BLOCKS, "torch.randperm(len(eligible), generator=generator)[:count]",
        "torch.randint(max(len(eligible), 1), (min(count, len(eligible)),), generator=generator)",
        "test_blocks.py::test_eligible_and_sampled_anchors",
    ),
    Mutant(
        "the same anchors in every epoch", BLOCKS, "{seed}/{epoch}/{row_id}", "{seed}/{row_id}",
        "test_blocks.py::test_anchors_depend_on_the_arguments_alone",
    ),
    # objective
    Mutant("loss without weight", OBJECTIVE, "(weight_N * loss_N).sum()", "loss_N.sum()", LOSS),
    Mutant(
        "gradient without weight", OBJECTIVE, "(grad_ND * grad_N[:, None]).to(grad_ND.dtype)", "grad_ND.clone()", LOSS,
    ),
    Mutant("soft-cap without slope", OBJECTIVE, "if ends.softcap is not None:", "if False:", LOSS),
    Mutant(
        "gradient without the logit scale", OBJECTIVE, "torch.mul(probs, ends.logit_scale",
        "torch.mul(probs, 1.0", LOSS,
    ),
    Mutant("D-PACE forgets the later slots", OBJECTIVE, "chain_AS.flip(1).cumsum(dim=1).flip(1)", "chain_AS", OTHER),
    Mutant("D-PACE without smoothing", OBJECTIVE, "alpha: float = 0.5", "alpha: float = 0.0", OTHER),
    Mutant("distillation towards the label", OBJECTIVE, "if teacher_ND is None:", "if True:", OTHER),
    Mutant("a chunk is lost", OBJECTIVE, "0, len(hidden_ND), chunk)", "0, len(hidden_ND) - 1, chunk)", LOSS),
    Mutant("right slots from the labels", OBJECTIVE, "= predicted_N == label_N", "= predicted_N == predicted_N", LOSS),
    # the drafter
    Mutant("no hidden_norm on the context", MODEL, "self.hidden_norm(self.fc(", "(self.fc(", FORMULA),
    Mutant(
        "k_norm leaves out the context", MODEL,
        "k = self.k_norm(self.k_proj(both_BND).unflatten(-1, (-1, self.head_dim)))",
        "k = self.k_proj(both_BND).unflatten(-1, (-1, self.head_dim));"
        " k = torch.cat((k[:, :first_slot], self.k_norm(k[:, first_slot:])), dim=1)", FORMULA,
    ),
    Mutant("no q_norm", MODEL, "q = self.q_norm(self.q_proj(x_BQD)", "q = (self.q_proj(x_BQD)", FORMULA),
    Mutant("no final norm", MODEL, "return self.norm(x_BQD)", "return x_BQD", FORMULA),
    Mutant("queries at the context's positions", MODEL, "cos[:, first_slot:], sin[:, first_slot:]",
           "cos[:, : x_BQD.shape[1]], sin[:, : x_BQD.shape[1]]", FORMULA),
    Mutant("the embedding scale is dropped", MODEL, 'extra.get("input_embedding_scale", 1.0)', "1.0",
           "test_model.py::test_scales_are_those_of_the_real_model"),
    Mutant("soft-cap without its factor", MODEL, "self.softcap * torch.tanh(", "torch.tanh(",
           "test_model.py::test_scales_are_those_of_the_real_model"),
    Mutant("the block lies one place too far", MODEL, "torch.cat((kept_BT, slot_BQ), dim=1), told.bound",
           "torch.cat((kept_BT, slot_BQ + 1), dim=1), told.bound", SERVE),
    Mutant("serving: positions begin anew at each call", MODEL,
           "positions_BN = torch.cat((context_BT, slot_BQ), dim=1)",
           "positions_BN = torch.cat((context_BT, slot_BQ), dim=1) - told.first_B[:, None]", SERVE),
    Mutant("serving: drafts from the anchor's slot", MODEL, "hidden_BQD[:, 1:]", "hidden_BQD[:, :-1]", SERVE),
    Mutant("batches: a block sees beyond its own end", MODEL, "mask = None if told.exact else",
           "mask = None if True else", DRAFTS),
    # the baselines
    Mutant("a baseline reads the state of its own token", BASELINE, "self.fc.in_features :], (0, 0, 1, -1))",
           "self.fc.in_features :], (0, 0, 0, 0))", UNROLLED),
    Mutant("a baseline's chain sees other chains", BASELINE, "own, slots = torch.eye(len(anchor_A), dtype",
           "own, slots = torch.ones(len(anchor_A), len(anchor_A), dtype", UNROLLED),
    Mutant("a baseline's context sees other documents", BASELINE, "(index_T >= (index_T - position_T)[:, None])",
           "(index_T >= 0)", UNROLLED),
    Mutant("a baseline's step reads the first state again", BASELINE, "            hidden = self._through(forced",
           "            _ = self._through(forced", UNROLLED),
    Mutant("a baseline drafts behind void features", BASELINE, "state[\"before\"] = before_BNF.gather(1, last)",
           "state[\"before\"] = before_BNF[:, -1:]", DRAFTED),
    Mutant("a baseline's drafts stand one place too early", BASELINE, "length_B1 + len(drafts)",
           "length_B1 + len(drafts) - 1", DRAFTED),
    Mutant("ranks' counts are not added up", EVALUATE, "dist.all_reduce(counts :=", "(counts :=", PATTERNS),
    Mutant("every rank measures all rows", EVALUATE, "in rows[rank::world]", "in rows", PATTERNS),
    Mutant("bins of a row are walked one by one", EVALUATE, "accepted += run_AS", "accepted = run_AS", PATTERNS),
    Mutant("a bad file's line hides the key", "data_prep/run.py", "line = more[0]", "pass",
           "test_config.py::test_an_unknown_key_in_a_file_is_named"),
    Mutant("fixed anchors are neighbours", DATA, "[:: self.model.block_size][:count]", "[:count]",
           "test_data.py::test_fixed_anchors_cut_answers_into_blocks"),
    Mutant("an ablation is another", "configs/ablation/fused.yaml", "kind: fused", "kind: tokens",
           "test_config.py::test_an_ablation_changes_one_thing"),
    Mutant("mtp reads packed features", "train/config.py", "self.drafter.kind == Kind.mtp and", "False and",
           "test_config.py::test_baselines_are_trained_and_no_more"),
    Mutant("a set's own number is forgotten", EVALUATE, "int(wish.rpartition(\":\")[2])", "config.evaluate.prompts",
           "test_evaluation.py::test_a_set_can_name_its_own_number_of_prompts"),
    Mutant("every n-th prompt is asked", "train/sets.py", "random.Random(0).sample(range(len(rows)), count)",
           "[i * len(rows) // count for i in range(count)]", "test_sets.py::test_packages_carry_two_sets"),
    Mutant("tau counts the prefill's token", "train/figures.py", "sums[..., 0] / sums[..., 1]",
           "(sums[..., 0] + 1) / sums[..., 1]",
           "test_metrics.py::test_the_evaluators_tau_is_what_the_targets_forwards_say"),
    Mutant("fused: slots see only what is behind them", BASELINE, "last_BN = torch.cat((position_BN, slot_BS[:, -1:]",
           "last_BN = torch.cat((position_BN, slot_BS[:, :1]", DRAFTED),
    Mutant("fused: blocks see one another", BASELINE, "block_Q[:, None] == block_Q)",
           "block_Q[:, None] >= 0 * block_Q)", UNROLLED),
    # target and config
    Mutant("tap off by one", GENERATE, "layers[tap].register", "layers[tap + 1].register",
           "test_model.py::test_features_are_hf_hidden_states"),
    Mutant("an untied head is the embedding", "dflash/target.py", "head = embed if tied", "head = embed if True",
           "test_model.py::test_load_ends_reads_the_models_tables"),
    Mutant("taps spread to the last layer", "dflash/config.py", "1, target_layers - 3", "1, target_layers - 2",
           "test_model.py::test_spread_taps_golden"),
    Mutant("Granite's logits are multiplied", "dflash/config.py", "1 / c.logits_scaling", "c.logits_scaling",
           "test_model.py::test_scales_are_those_of_the_real_model"),
    # decoding
    Mutant("accept: <= for <", GENERATE, "uniform * q_drafts < p_drafts", "uniform * q_drafts <= p_drafts",
           "test_generate.py::test_impossible_tokens_are_never_accepted"),
    Mutant("accept against the draft's own probability", GENERATE, "uniform * q_drafts < p", "uniform < p", CHI),
    Mutant("the residual is not subtracted", GENERATE, "torch.where(nothing, last, residual)", "last", CHI),
    Mutant("the residual is of the slot before", GENERATE, "(q, (0, 0, 0, 1))", "(q, (0, 0, 1, 0))", CHI),
    Mutant("sequences share their random numbers", GENERATE, "torch.rand(batch, num,", "torch.rand(1, num,",
           "test_generate.py::test_sampling_through_the_whole_loop"),
    Mutant("top-p is not renormalised", GENERATE, "probs = probs / probs.sum(-1, keepdim=True)", "pass", CHI),
    Mutant("top-p excludes the crossing token", GENERATE, "ordered.cumsum(-1) - ordered >= top_p",
           "(ordered.cumsum(-1) > top_p) & (ordered < ordered[..., :1])",
           "test_generate.py::test_probabilities_are_hfs_warpers"),
    Mutant("top-p before top-k", GENERATE, "logits < logits.topk(top_k).values[..., -1:]",
           "logits < logits.topk(top_k).values[..., :1]", "test_generate.py::test_probabilities_are_hfs_warpers"),
    Mutant("greedy: any right draft counts", GENERATE, "(drafts == best[:, :num]).long().cumprod(1)",
           "(drafts == best[:, :num]).long()",
           "test_generate.py::test_greedy_acceptance_is_the_longest_right_prefix"),
    Mutant("sampling: any right draft counts", GENERATE, "p_drafts).long().cumprod(1).sum(1)",
           "p_drafts).long().sum(1)", CHI),
    Mutant("stop: the last token alone is looked at", GENERATE, "(stop_BS & open_BS).any(1)",
           "(stop_BS & open_BS)[:, -1]", "test_generate.py::test_stop_token"),
    Mutant("stop: tokens behind it are kept", GENERATE, "- stop_BS.long() == 0)", "- stop_BS.long() < 9)",
           "test_generate.py::test_stop_token"),
    Mutant("the limit is ignored inside a block", GENERATE, "slot_S < (self.limit - self.count_B)[:, None]",
           "slot_S < self.limit", "test_generate.py::test_counts_by_hand"),
    Mutant("counts without trimming", GENERATE, "self.steps.append((open_BS.sum(1),", "self.steps.append((right_B + 1,",
           "test_generate.py::test_counts_by_hand"),
    Mutant("who is done goes on", GENERATE,
           "(stop_BS.long().cumsum(1) - stop_BS.long() == 0) & ~self.done_B[:, None]",
           "stop_BS.long().cumsum(1) - stop_BS.long() == 0", BATCH),
    Mutant("the next round starts one token early", GENERATE, "self.length_B + right_B + 1)",
           "self.length_B + right_B)",
           "test_generate.py::test_greedy_equals_hf"),
    Mutant("the target sees one place less", GENERATE, "return tuple(buffer[:, :, : self.bound]",
           "return tuple(buffer[:, :, : self.bound - (self.bound > 40)]", "test_generate.py::test_greedy_equals_hf"),
    Mutant("batches: rejected drafts are seen", GENERATE, "device=ids_BT.device) > position_BT[..., None]",
           "device=ids_BT.device) > bound + position_BT[..., None]", BATCH),
    Mutant("batches: the first token is the longest prompt's", GENERATE, "        if even:\n", "        if True:\n",
           BATCH),
    Mutant("features of rejected drafts", MODEL, "torch.where(context_BT < length_B1, context_BT, cache.capacity - 1)",
           "context_BT + 0 * length_B1", DRAFTS),
    Mutant("features without the last verified token", MODEL, "torch.where(context_BT < length_B1,",
           "torch.where(context_BT < length_B1 - 1,", SEES),
    Mutant("the host waits in every round", GENERATE, "            logits = run(ids_BT, first_B, bound)\n",
           "            logits = run(ids_BT, first_B, bound)\n            assert int(first_B.max()) >= 0\n",
           "test_generate.py::test_the_host_waits_once_a_look"),
    Mutant("sliding windows are not refused", GENERATE, "    if kinds or (getattr", "    if False and (getattr",
           "test_generate.py::test_sliding_window_targets_are_refused_by_name"),
    Mutant(
        "a group misses its last context token", BLOCKS, "context = slice(starts[first], anchors[end - 1])",
        "context = slice(starts[first], anchors[end - 1] - 1)", "test_blocks.py::test_grouped_mask_is_the_dense_mask",
    ),
    Mutant(
        "a group sees the next document", BLOCKS, "and starts[end] == starts[first]:", "and True:",
        "test_blocks.py::test_grouped_mask_is_the_dense_mask",
    ),
    Mutant(
        "start from the target: the input norm is not folded", "dflash/target.py",
        'found = found.float() * source["input_layernorm.weight"].float()', "found = found.float()",
        "test_start.py::test_context_keys_and_values_are_the_targets",
    ),
    Mutant(
        "the evaluator counts a step too many", EVALUATE, "fast.tokens), fast.seconds, fast.accepted",
        "fast.tokens), fast.seconds, fast.accepted + [1]",
        "test_generate.py::test_an_oracle_scores_the_block_size_in_the_evaluator",
    ),
    # the step
    Mutant(
        "rank-local denominator",
        DATA,
        "weight += normaliser(blocks, self.objective)",
        "weight += normaliser(blocks, self.objective) if mine else 0.0",
        SAME,
    ),
    Mutant(
        "anchors depend on the rank",
        DATA,
        "count, seed=self.seed, **named",
        "count, seed=self.seed + self.rank, **named",
        SAME,
    ),
    Mutant(
        "anchors are the same each epoch",
        DATA,
        '"epoch": epoch, "row_id"',
        '"epoch": 0, "row_id"',
        "test_data.py::test_order_and_anchors_change_with_epoch_and_seed",
    ),
    Mutant(
        "an empty bin trains a row again",
        DATA,
        "                batch.blocks.weight_AS.zero_()\n                batch.weighted_N = batch.weighted_N[:0]\n",
        "                pass\n",
        SAME,
    ),
    Mutant(
        "bins are dealt unevenly", DATA, "range(-(-len(bins) // self.world) * self.world)", "range(len(bins))", SAME
    ),
    Mutant(
        "the last rows of an epoch are dropped",
        DATA,
        "return -(-len(self.order(0)) // self.batch.rows_per_step)",
        "return len(self.order(0)) // self.batch.rows_per_step",
        SAME,
    ),
    Mutant(
        "the teacher's state of the label's own position",
        DATA,
        "[token_N - 1]",
        "[token_N]",
        "test_data.py::test_the_teachers_state_stands_one_before_the_label",
    ),
    Mutant(
        "D-PACE divided by the decay's weights",
        DATA,
        "if objective == Objective.dpace:",
        "if False:",
        "test_data.py::test_d_pace_is_divided_by_the_number_of_blocks",
    ),
    Mutant(
        "a step that is not finite is taken",
        ENGINE,
        "(~norm.isfinite()).float()",
        "torch.zeros(())",
        "test_resume.py::test_a_step_that_is_not_finite_is_skipped_and_counted",
    ),
    Mutant(
        "bins over the anchor budget",
        DATA,
        "tokens[item] <= t and anchors[item] <= a",
        "tokens[item] <= t",
        "test_data.py::test_bins_keep_to_both_budgets_and_drop_nothing",
    ),
    Mutant(
        "a bin is divided by its own weight",
        TRAINER,
        "engine.backward(result.loss, step.weight,",
        "engine.backward(result.loss, float(batch.blocks.weight_AS.sum()) or 1.0,",
        "test_engine.py::test_gradient_and_weights_do_not_depend_on_budgets",
    ),
    # the optimiser
    Mutant("weight decay on norms", ENGINE, '"weight_decay": 0.0', '"weight_decay": optim.weight_decay', ADAMW),
    Mutant(
        "no clipping",
        ENGINE,
        "nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)",
        "nn.utils.clip_grad_norm_(self.module.parameters(), 1e9)",
        ADAMW,
    ),
    Mutant(
        "the learning rate is never set",
        ENGINE,
        '        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)\n        for group in self.optimizer.param_groups:\n            group["lr"] = lr\n',  # noqa: E501
        "        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)\n",
        ADAMW,
    ),
    Mutant(
        "ranks are averaged, not summed",
        ENGINE,
        "loss * (self.world / step_weight)",
        "loss * (1 / step_weight)",
        "test_engine.py::test_two_deepspeed_processes_equal_one_of_torch",
    ),
    Mutant(
        "rounded masters",
        ENGINE,
        "self.load_state(masters | zeros, step=0)",
        "pass",
        "test_engine.py::test_bf16_deepspeed_keeps_fp32_masters_near_those_of_torch",
    ),
    Mutant(
        "deepspeed forgets the moments on resume",
        ENGINE,
        'safe_set_full_optimizer_state(p, tensors[f"{name}/{moment}"].to(self.device), moment)',
        "pass",
        "test_engine.py::test_a_run_changes_engine_between_steps",
    ),
    Mutant(
        "schedule off by one",
        TRAINER,
        "learning_rate(step, total, optim)",
        "learning_rate(step + 1, total, optim)",
        "test_resume.py::test_logged_learning_rates_are_those_of_the_schedule",
    ),
    Mutant(
        "warm-up off by one",
        TRAINER,
        "optim.lr * (step + 1) / warmup",
        "optim.lr * step / warmup",
        "test_resume.py::test_learning_rate_golden_values",
    ),
    # resume
    Mutant(
        "resume forgets the optimiser's step",
        ENGINE,
        '"step": torch.tensor(float(step), device=parameter.device)',
        '"step": torch.tensor(0.0, device=parameter.device)',
        RESUME,
    ),
    Mutant(
        "resume repeats a step",
        TRAINER,
        'return trainer["step"], trainer["wandb"]',
        'return trainer["step"] - 1, trainer["wandb"]',
        RESUME,
    ),
    Mutant(
        "a half-written checkpoint counts",
        CHECKPOINT,
        'if path.suffix != ".part" and (path / "trainer.json").exists()',
        "if True",
        "test_resume.py::test_resume_takes_the_newest_complete_checkpoint",
    ),
    Mutant(
        "pruning deletes the best",
        CHECKPOINT,
        "{*complete(folder)[-keep:], best(folder)}",
        "{*complete(folder)[-keep:]}",
        "test_resume.py::test_pruning_keeps_the_newest_and_the_best",
    ),
    # measures
    Mutant(
        "the walk forgets the bonus token",
        EVALUATE,
        "min(accepted[first] + 1, last - first)",
        "min(accepted[first] or 1, last - first)",
        WALK,
    ),
    Mutant(
        "the walk counts behind the answer's end",
        EVALUATE,
        "min(accepted[first] + 1, last - first)",
        "accepted[first] + 1",
        WALK,
    ),
    Mutant(
        "prompts are drawn without replacement", "train/figures.py",
        "torch.randint(num, (DRAWS, num), generator=torch.Generator().manual_seed(0))",
        "torch.arange(num).expand(DRAWS, -1)",
        "test_metrics.py::test_intervals_are_quantiles_of_draws_of_the_prompts",
    ),
    Mutant(
        "what a path says wins over the command line", "data_prep/run.py", "[*overrides, *extra]", "extra or overrides",
        "test_verify.py::test_a_path_stands_for_the_model_and_overrides_win",
    ),
    Mutant(
        "an engine's tau without the bonus token", DIAGNOSE, 'return 1 + counted["accepted"]',
        'return counted["accepted"]',
        "test_diagnose.py::test_an_engines_tau_comes_from_its_counters",
    ),
    Mutant(
        "means of means",
        "train/figures.py",
        '"tau": float(tau_of(total_C)) if steps else None',
        '"tau": sum(sum(r.accepted) / len(r.accepted) for r in results) / len(results)',
        "test_metrics.py::test_acceptance_is_pooled_over_blocks_however_they_are_grouped",
    ),
    Mutant(
        "a block's right slots need no prefix",
        TRAINER,
        "run_AS.cumprod(dim=1).sum(dim=0)",
        "run_AS.sum(dim=0)",
        "test_metrics.py::test_prefix_right_counts_whole_blocks",
    ),
    # encode
    Mutant(
        "one token too many is supervised",
        ENCODE,
        "[0] * (len(prompt) - len(last.ids)) + [1] * len(answer)",
        "[0] * (len(prompt) - len(last.ids) - 1) + [1] * (len(answer) + 1)",
        TURNS,
    ),
    Mutant("the end of turn is not supervised", ENCODE, "return answer[: end + 1]", "return answer[:end]", TURNS),
    Mutant(
        "all that stands behind the end of turn is supervised",
        ENCODE,
        "return answer[: end + 1]",
        "return answer",
        TURNS,
    ),
    Mutant(
        "a rewritten history is taken for a prefix",
        ENCODE,
        "prompt[: len(out[-1].ids)] == out[-1].ids",
        "True",
        "test_encode.py::test_a_rewritten_history_gives_one_row_a_turn",
    ),
    Mutant(
        "answers are tokenised again",
        ENCODE,
        'if row.get("answer_ids") is not None and len(answers) == 1:',
        "if False:",
        "test_encode.py::test_answer_ids_are_taken_verbatim",
    ),
    # prompts, store, capture
    Mutant(
        "prompts stand twice", PROMPTS, "if config.dedup and key in prompts:", "if False:",
        "test_prompts.py::test_drops_are_counted_by_reason_and_add_up",
    ),
    Mutant("held-out rows by position", ENCODE, "digest(prompt_of(row))", 'digest(row["id"])', HELDOUT),
    Mutant("held-out rows by the whole conversation", ENCODE, "digest(prompt_of(row))", "digest(row)", HELDOUT),
    Mutant(
        "store row off by one", STORE, "start, end = offsets[at], offsets[at + 1]",
        "start, end = offsets[at - 1], offsets[at]", "test_store.py::test_rows_come_back_as_they_were_written",
    ),
    Mutant(
        "rows of a batch are mixed up", CACHE, "in zip(batch, rows, strict", "in zip(sorted(batch), rows, strict",
        "test_store.py::test_rows_longer_than_a_batch_are_captured_too",
    ),
    Mutant(
        "capture of the layer behind the tap", PREPARE, "features(target[0], ids, self.taps, cache.last)",
        "features(target[0], ids, [tap + 1 for tap in self.taps], cache.last)",
        "test_store.py::test_the_whole_way_gives_the_targets_states",
    ),
    Mutant(
        "the folder does not know the dtype", PREPARE, '            "dtype": cache.dtype,\n', "",
        "test_store.py::test_all_that_determines_the_content_changes_the_folder",
    ),
    Mutant(
        "states need not be finite", CACHE, "not bool(states_TD.isfinite().all())", "False",
        "test_store.py::test_states_that_no_sound_target_gives_are_refused",
    ),
    # codecs
    Mutant(
        "int8 without its scale", CODEC, "(stored_TR * self.scale_R)", "(stored_TR * 1.0)",
        "test_store.py::test_int8_is_within_half_a_step",
    ),
    Mutant(
        "heavy tokens set the scale", CODEC, "x = one_length(features_TF.float(), self.size_F)",
        "x = features_TF.float()",
        "test_store.py::test_a_tokens_length_is_free_and_a_heavy_one_costs_the_others_nothing",
    ),
    Mutant(
        "fold by the wrong matrix", CODEC, "weight_DR @ self.map_FR.T.to(weight_DR)",
        "weight_DR @ self.lift_FR.T.to(weight_DR)",
        "test_store.py::test_folded_weights_read_features_as_the_trained_ones_read_codes",
    ),
    Mutant(
        "low rank of channels as large as they are", CODEC, "moments_FF = (x / size_F).T @ (x / size_F)",
        "moments_FF = x.T @ x",
        "test_store.py::test_lowrank_is_the_leading_part_of_the_scaled_second_moments",
    ),
    Mutant(
        "low rank about the mean", CODEC, "(x / size_F).T @ (x / size_F) / len(x)",
        "torch.cov((x / size_F).T)",
        "test_store.py::test_lowrank_is_the_leading_part_of_the_scaled_second_moments",
    ),
    Mutant(
        "the last worker's codec stays", CODEC, "path.hardlink_to(part)",
        "path.unlink(missing_ok=True), path.hardlink_to(part)", "test_store.py::test_the_first_workers_codec_stays",
    ),
    # claims, records, damage
    Mutant("claims are ignored", CACHE, "if path.stem in held or ", "if ", CLAIMS),
    Mutant(
        "claims of the dead hold", FILES, "except ProcessLookupError:\n        return True",
        "except ProcessLookupError:\n        return False", CLAIMS,
    ),
    Mutant(
        "claims give no sign of life", CACHE, "        claim.touch()\n", "",
        "test_store.py::test_a_worker_gives_signs_of_life",
    ),
    Mutant(
        "a record counts without its shard", CACHE, ' and path.stat().st_size == record["bytes"]', "",
        "test_store.py::test_resume_writes_only_what_is_missing_and_the_same_bytes",
    ),
    Mutant(
        "checksums are not compared", AUDIT, '!= record["sha256"]:', "is None:", f"{DAMAGE}[a flipped bit]",
    ),
    Mutant("the place of a shard is not checked", AUDIT, "{first},' not in about", "' not in about",
           f"{DAMAGE}[swapped shards]"),
    Mutant("the recipe of a shard is not checked", AUDIT, '"{name}"\' not in about', "' not in about",
           f"{DAMAGE}[a shard of another cache]"),
    Mutant("an audit does not look at the states", AUDIT, "if not values.isfinite().all():", "if False:",
           f"{DAMAGE}[states that are not finite]"),
    # regenerate
    Mutant(
        "no attention mask over the padding", REGENERATE, "attention_mask=mask",
        "attention_mask=torch.ones_like(mask)", "test_regenerate.py::test_batched_answers_equal_single_ones",
    ),
    Mutant(
        "a resumed run answers all again", REGENERATE, 'if all(window[i]["id"] in done for i in batch):', "if False:",
        "test_regenerate.py::test_an_interrupted_run_goes_on_and_answers_nothing_twice",
    ),
    Mutant(
        "samples depend on what was answered before", REGENERATE,
        'torch.manual_seed(int(digest([config.seed, window[batch[0]]["id"]]), 16))', "pass",
        "test_regenerate.py::test_sampled_answers_do_not_depend_on_interruptions",
    ),
    Mutant(
        "a server is asked for done rows again", REGENERATE, 'enumerate(rows) if row["id"] not in done)',
        "enumerate(rows))", "test_regenerate.py::test_refused_rows_are_named_and_asked_again_by_the_next_run",
    ),
    Mutant(
        "a server's text without the stop token", REGENERATE,
        'if choice["finish_reason"] == "stop" and (not ids or ids[-1] not in stops):', "if False:",
        "test_regenerate.py::test_text_becomes_tokens_with_the_stop_token_behind_it",
    ),
    Mutant(
        "a server's tokens are made from its text", REGENERATE, "made_here = ids is None", "made_here = True",
        "test_regenerate.py::test_servers_get_the_prompts_ids_and_their_tokens_are_taken_verbatim",
    ),
    Mutant(
        "a failed request goes to the same server", REGENERATE, "servers[attempt % len(servers)]",
        "servers[0]", "test_regenerate.py::test_a_failed_request_goes_to_the_next_server",
    ),
    # export
    Mutant(
        "an export names other taps", EXPORT, '"dflash_config": inside,',
        '"dflash_config": inside | {"target_layer_ids": [t + 1 for t in inside["target_layer_ids"]]},',
        "test_verify.py::test_every_models_drafter_is_read_as_it_was_trained",
    ),
    Mutant(
        "export with another rotary base", EXPORT, "theta = rope_theta(config)", "theta = 10000.0",
        "test_verify.py::test_every_models_drafter_is_read_as_it_was_trained",
    ),
    Mutant(
        "speculators' ids are z-lab's", EXPORT, "[tap + 1 for tap in", "[tap for tap in",
        "test_verify.py::test_every_models_drafter_is_read_as_it_was_trained",
    ),
    Mutant(
        "a draft too many", EXPORT, '"speculative_tokens": config.block_size - 1',
        '"speculative_tokens": config.block_size',
        "test_export.py::test_speculators_config_is_that_of_the_format",
    ),
    Mutant(
        "a baseline is exported as DFlash", EXPORT, '["drafter"]["kind"]) != "dflash"', '["drafter"]["kind"]) == ""',
        "test_export.py::test_a_baseline_is_not_exported",
    ),
    Mutant(
        "the door is open", EXPORT, "refuse(verify(part, drafter))", "verify(part, drafter)",
        "test_export.py::test_an_export_that_was_written_wrong_never_appears_and_the_older_one_stays",
    ),
    Mutant(
        "only vLLM's rules are asked", VERIFY, "for engine, rules in RULES.items():",
        "for engine, rules in [*RULES.items()][:1]:",
        "test_export.py::test_a_config_that_engines_read_otherwise_is_refused_by_name[flat theta]",
    ),
    Mutant(
        "the cache's taps are not compared", VERIFY,
        '(captured := training["captured_taps"]) != trained["taps"]:', "(captured := None):",
        "test_export.py::test_a_cache_of_other_taps_is_refused",
    ),
    Mutant(
        "the reload is not compared", VERIFY, "if not difference <= PROBE_TOLERANCE:", "if False:",
        "test_export.py::test_tensors_that_are_not_those_of_the_format_are_refused[other values]",
    ),
    Mutant(
        "added tensors pass", VERIFY, "for name in sorted(found.keys() - expected.keys() - optional.keys()):",
        "for name in ():", "test_export.py::test_tensors_that_are_not_those_of_the_format_are_refused[added]",
    ),
    # doctor and Hub
    Mutant(
        "the live rung reads the cache", DIAGNOSE, "heldout_measures(drafter, ends, live, held, config)",
        "heldout_measures(drafter, ends, store, held, config)", "test_diagnose.py::test_features_of_other_taps",
    ),
    Mutant(
        "the export's rung runs the checkpoint", DIAGNOSE, '("export", _load_export(config.path, dtype))',
        '("export", drafter)', "test_diagnose.py::test_an_export_with_another_mask_token",
    ),
    Mutant(
        "the loop asks the cache's prompts", DIAGNOSE, "prompts.append(ids)",
        "prompts.append(wanted[name][: len(ids)])",
        "test_diagnose.py::test_a_thinking_mode_that_was_switched",
    ),
    # servers
    Mutant(
        "a server's bonus token is not counted", AT_SERVER, 'tau = 1 + counts["accepted"] / drafts',
        'tau = counts["accepted"] / drafts', "test_evaluate_server.py::test_figures_are_those_of_the_script",
    ),
    Mutant(
        "the prefill's token is a verification's", AT_SERVER, "tau = (fast.tokens - fast.requests) / drafts",
        "tau = fast.tokens / drafts", "test_evaluate_server.py::test_sglang_counts_verifications",
    ),
    Mutant(
        "every server says what came before", AT_SERVER, "follow = None", "pass",
        "test_evaluate_server.py::test_figures_are_those_of_the_script",
    ),
    Mutant(
        "drafters' counters are mixed up", AT_SERVER, "done = server.ask(", "done = [*servers.values()][-1].ask(",
        "test_evaluate_server.py::test_each_drafter_is_measured_next_to_the_others",
    ),
    Mutant(
        "the target alone is asked last", AT_SERVER, 'lambda name: name != "alone"', 'lambda name: name == "alone"',
        "test_evaluate_server.py::test_each_drafter_is_measured_next_to_the_others",
    ),
    Mutant(
        "a failure of the target alone counts for each drafter", AT_SERVER, '{p["concurrency"]: p["alone"] for',
        '{id(p): p["alone"] for',
        "test_evaluate_server.py::test_failed_requests_are_counted_and_end_it_behind_the_report",
    ),
    Mutant(
        "foreign requests pass", AT_SERVER, "(more := max(told - emitted - allowed,", "(more := max(0,",
        "test_evaluate_server.py::test_foreign_requests_are_flagged",
    ),
    Mutant(
        "failed requests are dropped", AT_SERVER, "    if failed:\n", "    if False:\n",
        "test_evaluate_server.py::test_failed_requests_are_counted_and_end_it_behind_the_report",
    ),
    Mutant(
        "a failed request is sent again", SERVER, "read, tries=1)", "read)",
        "test_evaluate_server.py::test_failed_requests_are_counted_and_end_it_behind_the_report",
    ),
    Mutant(
        "counters from the server's start", SERVER, 'else before[word]) for word', "else 0) for word",
        "test_evaluate_server.py::test_figures_are_those_of_the_script",
    ),
    Mutant(
        "any server is the target's", SERVER, "if names & wanted), None)", "if names), None)",
        "test_evaluate_server.py::test_a_server_of_another_kind_is_refused_in_one_line",
    ),
    Mutant(
        "the Hub gets everything in the folder", PUBLISH, '"config.json", "model.safetensors", "model-*',
        '"config.json", "*", "model-*', "test_publish.py::test_exactly_the_drafters_files_arrive_as_they_are",
    ),
    Mutant(
        "server URLs are published", PUBLISH, 'value = value | {"server": len(servers)}', "pass",
        "test_publish.py::test_what_training_tells_names_no_place",
    ),
    Mutant(
        "removed paths may stand in the card", PUBLISH, "*(START + re.escape(text) for text in removed),", "",
        "test_publish.py::test_what_tells_too_much_is_refused",
    ),
    Mutant(
        "the token is masked behind the cut", PUBLISH, '(line.replace(token, "***") if token else line)[:300]',
        'line[:300].replace(token or "-", "***")',
        "test_publish.py::test_a_failure_at_any_step_is_one_line_and_can_be_repeated",
    ),
    Mutant(
        "a private drafter goes to a public repository", PUBLISH,
        "exposed = private and not api.model_info(repo).private", "exposed = False",
        "test_publish.py::test_a_private_drafter_does_not_go_to_a_public_repository",
    ),
]  # fmt: skip


def run_tests(tree: Path, tests) -> bool:
    """Do these tests pass in that tree?"""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: a test failed; anything else is no verdict
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    for mutant in chosen:
        source = (ROOT / mutant.file).read_text()
        assert source.count(mutant.old) == 1, f"{mutant.name}: found {source.count(mutant.old)} x {mutant.old!r}"
        if mutant.file.endswith(".py"):
            ast.parse(source.replace(mutant.old, mutant.new), mutant.name)
    with tempfile.TemporaryDirectory() as folder:
        trees = queue.SimpleQueue()
        for worker in range(WORKERS):
            for name in TREE:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                (Path(folder) / str(worker)).mkdir(exist_ok=True)
                copy(ROOT / name, Path(folder) / str(worker) / name)
            trees.put(Path(folder) / str(worker))
        tree = trees.get()
        if not run_tests(tree, sorted({f"tests/{m.test}" for m in chosen})):
            print("the named tests fail without any fault planted")
            return 1
        trees.put(tree)

        def caught(mutant: Mutant) -> bool:
            tree, start = trees.get(), time.perf_counter()
            source = (tree / mutant.file).read_text()
            (tree / mutant.file).write_text(source.replace(mutant.old, mutant.new))
            failed = not run_tests(tree, [f"tests/{mutant.test}"])
            (tree / mutant.file).write_text(source)
            trees.put(tree)
            seconds = time.perf_counter() - start
            print(f"{'caught' if failed else 'MISSED'}  {seconds:5.1f} s  {mutant.name}", flush=True)
            return failed

        with ThreadPoolExecutor(WORKERS) as pool:
            num_caught = sum(pool.map(caught, chosen))
    print(f"{num_caught} of {len(chosen)} faults caught")
    return 0 if num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
