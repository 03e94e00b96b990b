"""`make mutants`: plant one fault at a time in a copy of the tree and show that the named test fails.

Each entry: a name, the file, text that occurs there exactly once, what replaces it, and the test that must fail. The
tests are first run on an unchanged copy, where they must pass. Exit 1 if any fault is missed.

    python tests/mutants.py [words]      only entries whose name contains one of the words
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
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
CAUSAL = "test_model.py::test_context_is_causal_and_of_one_document"
FORMULA = "test_model.py::test_drafter_is_zlabs_formula"
SERVE = "test_model.py::test_training_forward_is_the_decoder_with_its_cache"
CHI = "test_generate.py::test_acceptance_keeps_the_targets_distribution"
SEES = "test_generate.py::test_the_drafter_sees_all_verified_text"

MUTANTS = [
    # blocks and mask
    Mutant("label shifted by one", BLOCKS, "label_AS=ids_T[token_AS]", "label_AS=ids_T[token_AS - 1]", MADE),
    Mutant("the anchor's feature is visible", BLOCKS, "(key < anchor_A[block])", "(key <= anchor_A[block])", CAUSAL),
    Mutant("mask: <= for <", BLOCKS, "(key < anchor_A[block])", "(key <= anchor_A[block])", MASK),
    Mutant("mask: other documents are visible", BLOCKS, "(key >= start_A[block]) & (key", "(key >= 0) & (key", CAUSAL),
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
    Mutant("loss without weight", OBJECTIVE, "loss += (weight * (", "loss += (1.0 * (", LOSS),
    Mutant(
        "gradient without weight", OBJECTIVE, "torch.mul(probs, weight * ends.logit_scale",
        "torch.mul(probs, ends.logit_scale", LOSS,
    ),
    Mutant("soft-cap without slope", OBJECTIVE, "if ends.softcap is not None:", "if False:", LOSS),
    Mutant(
        "gradient without the logit scale", OBJECTIVE, "torch.mul(probs, weight * ends.logit_scale",
        "torch.mul(probs, weight", LOSS,
    ),
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
    Mutant("the cache keeps the block", MODEL, "cache.length += features_BTF.shape[1]",
           "cache.length += features_BTF.shape[1] + embeds_BQD.shape[1]", SERVE),
    Mutant("serving: positions begin anew at each call", MODEL, "torch.arange(first, end + 1 + num_drafts",
           "torch.arange(0, end - first + 1 + num_drafts", SERVE),
    Mutant("serving: drafts from the anchor's slot", MODEL, "hidden_BQD[0, 1:]", "hidden_BQD[0, :-1]", SERVE),
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
    Mutant("accept: <= for <", GENERATE, "uniform * q[at] < probs", "uniform * q[at] <= probs",
           "test_generate.py::test_impossible_tokens_are_never_accepted"),
    Mutant("accept against the draft's own probability", GENERATE, "uniform * q[at] < probs", "uniform < probs", CHI),
    Mutant("the residual is not subtracted", GENERATE, "(last - q[num_right]).clamp", "last.clamp", CHI),
    Mutant("top-p is not renormalised", GENERATE, "probs = probs / probs.sum(-1, keepdim=True)", "pass", CHI),
    Mutant("top-p excludes the crossing token", GENERATE, "ordered.cumsum(-1) - ordered >= top_p",
           "(ordered.cumsum(-1) > top_p) & (ordered < ordered[..., :1])",
           "test_generate.py::test_probabilities_are_hfs_warpers"),
    Mutant("top-p before top-k", GENERATE, "logits < logits.topk(top_k).values[..., -1:]",
           "logits < logits.topk(top_k).values[..., :1]", "test_generate.py::test_probabilities_are_hfs_warpers"),
    Mutant("greedy: any right draft counts", GENERATE, "(drafts == best[:num]).cumprod(0)", "(drafts == best[:num])",
           "test_generate.py::test_greedy_acceptance_is_the_longest_right_prefix"),
    Mutant("sampling: any right draft counts", GENERATE, ".long().cumprod(0).sum()", ".long().sum()", CHI),
    Mutant("stop: the last token alone is looked at", GENERATE, "for i, token in enumerate(new) if token in stops",
           "for i, token in enumerate(new) if i == len(new) - 1 and token in stops",
           "test_generate.py::test_stop_token"),
    Mutant("stop: not by the prefill's token", GENERATE, "        done = emit(token)\n        state",
           "        done = emit(token) and not stops\n        state", "test_generate.py::test_stop_token"),
    Mutant("the limit is ignored inside a block", GENERATE, ".tolist()[: max_new_tokens - len(result.tokens)]",
           ".tolist()", "test_generate.py::test_counts_by_hand"),
    Mutant("counts with the trimmed tokens", GENERATE, "result.accepted.append(len(result.tokens) - before)",
           "result.accepted.append(len(tokens))", "test_generate.py::test_counts_by_hand"),
    Mutant("crop off by one", GENERATE, "cache.crop(-num_wrong)", "cache.crop(-num_wrong - 1)",
           "test_generate.py::test_greedy_equals_hf"),
    Mutant("no crop", GENERATE, "cache.crop(-num_wrong)", "pass", "test_generate.py::test_greedy_equals_hf"),
    Mutant("features of rejected drafts", GENERATE, "state_BTD[:, : len(tokens)]", "state_BTD", SEES),
    Mutant("features without the last verified token", GENERATE, "state_BTD[:, : len(tokens)]",
           "state_BTD[:, : max(len(tokens) - 1, 1)]", SEES),
    Mutant("sliding windows are not refused", GENERATE, "    if kinds or (getattr", "    if False and (getattr",
           "test_generate.py::test_sliding_window_targets_are_refused_by_name"),
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
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in TREE:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        if not run_tests(tree, sorted({f"tests/{m.test}" for m in chosen})):
            print("the named tests fail without any fault planted")
            return 1
        for mutant in chosen:
            path, start = tree / mutant.file, time.perf_counter()
            source = path.read_text()
            assert source.count(mutant.old) == 1, f"{mutant.name}: found {source.count(mutant.old)} x {mutant.old!r}"
            path.write_text(source.replace(mutant.old, mutant.new))
            caught = not run_tests(tree, [f"tests/{mutant.test}"])
            path.write_text(source)
            missed += [] if caught else [mutant.name]
            seconds = time.perf_counter() - start
            print(f"{'caught' if caught else 'MISSED'}  {seconds:5.1f} s  {mutant.name}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
