"""The meaning of every metric that a run writes: the one list from which docs/reference/metrics.md is generated.

A name in braces stands for several keys: `grading/{status}` covers `grading/ok` and `grading/timeout`. `undocumented` finds keys
that no entry covers. Add an entry here when you add a metric.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

# Prefix -> introduction of its section, in the order of the page.
GROUPS: dict[str, str] = {
  'reward': "Rewards of the step's trajectories.",
  'completion': 'Lengths and ends of the completions.',
  'grading': 'Number of samples by the outcome of grading. One that is not `ok` has no reward, unless only weight 0 failed.',
  'judge': 'Use of the grader `judge`, summed over the samples of the step. Samples that were dropped are not counted.',
  'env': 'Values that the environment reports in `info["metrics"]`, averaged over the episodes that report them.',
  'agent': 'Episodes of agents (`config.task.kind=agent`): means over the episodes of the step.',
  'policy': (
    'The policy during the updates, on the tokens that the model wrote: the mean over the updates of the step. The drift of the '
    'last update is larger. `r` is the ratio in the loss.'
  ),
  'update': 'The optimiser step.',
  'optimizer': 'The settings of the optimiser that change during a run.',
  'tokens': 'Tokens since the run began. A resumed run continues the sums of its checkpoint.',
  'rollout_corr': (
    'The sampler against the learner before the update, on the tokens that the model wrote. `rho = exp(old log-prob - sampler '
    'log-prob)`, with the logarithm clamped to +-20. `w` is the correction weight; metrics of it are of `rho` if the correction '
    'has no weights (`level=None`). In bypass mode `reinforce` takes `w` from the current policy. If a step has several updates, '
    'the metrics are means over them, except for the largest values.'
  ),
  'sparse': 'The cache, and the consequences of evicting from it.',
  'fp8': 'FP8 weights and cache. Present only with FP8.',
  'moe': 'Load of the experts, averaged over layers. Present only for mixtures of experts.',
  'ledger': (
    'The log-ratio between learner and sampler (`gap`), split by cause, in nats per token. Lines of kind `ledger`, on the steps '
    'that `config.ledger` selects. `edges` and `histograms` of such a line count the tokens between values of each entry. '
    '[The ledger](../methods/ledger.md) has the formulas.\n\n'
    'The parts, which sum to `gap`:\n\n'
    "- `routing`: the part that replaying the rollout's experts removes.\n"
    '- `staleness`: older weights. 0 if rollouts do not run ahead.\n'
    "- `learner_fp8`: FP8 in the learner's linears (`config.quant.learner`), which the sampler's FP8 linears may cancel.\n"
    '- `numerics`: another order of computation. The learner reads packed rows in one pass, the sampler a dense cache.\n'
    '- `weights`: FP8 linears (Shapley value).\n'
    '- `kv`: FP8 cache, with `quant.softmax` (Shapley value).\n'
    '- `eviction`: cache eviction (Shapley value).\n'
    '- `reproduction`: the replay with all causes, minus the recorded log-probs. It is rounding if the settings describe the '
    'sampler.\n\n'
    'Not parts:\n\n'
    '- `interaction`: the effect of the FP8 linears, the FP8 cache and eviction together, minus the effect of each alone.\n'
    '- `interaction_weights_kv` and so on: the share of a pair of active causes. The shares sum to `interaction`.\n'
    '- `unreplayed`: the mismatch without router replay. Present only with router replay R3.'
  ),
  'async': (
    'The scheduler: age of the samples, and what was dropped. Counts are for the step.\n\n'
    'The `dropped_` metrics and the two lengths are about samples of groups that the step consumed, or that were dropped since '
    'the step before. *Trained* samples are those that the step consumed and did not withhold. Of a member that failed and was '
    'tried again, the last attempt counts. A sample that was stopped counts with the tokens that it had drawn when the host last '
    'looked, a lower bound of its length.'
  ),
  'engine': "Use of the sampler's rows since the step before, averaged over engines.",
  'packing': "The learner's packed rows, averaged over minibatches.",
  'data': 'The sources of a mixture (`config.task.mixture`). Present only with one.',
  'eval': 'Held-out evaluation. Lines of kind `eval`. A set of `config.eval.sets` has metrics with its name.',
  'time': (
    'Seconds, unless the meaning says otherwise. `metrics.jsonl` holds them in the object `time`, without the prefix. They are '
    'the only entries that differ between two runs of the same synchronous command on the same machine.'
  ),
}

_WEIGHT = 'rollout_corr/rollout_is'
_REJECT = 'rollout_corr/rollout_rs'

METRICS: dict[str, str] = {
  # --- rollouts ---------------------------------------------------------------------------------------------------------
  'reward/mean': 'Mean reward of the samples that could be graded.',
  'reward/std': 'Standard deviation of the reward over the same samples.',
  'reward/overlong_penalty': 'Mean penalty for long completions in the advantage. Present with `advantage.overlong`.',
  'reward/groups_equal': (
    'Share of the groups in which all rewards are equal. Group-relative advantages are 0 there, unless `advantage.overlong` '
    'penalises some of the answers.'
  ),
  'reward/{name}': (
    'Mean score by one of several rewards (`task.rewards`), without its weight, of the samples that it could grade.'
  ),
  'completion/length_mean': 'Mean number of tokens that the model wrote.',
  'completion/length_max': 'Largest number of tokens that the model wrote.',
  'completion/turns': 'Mean number of turns. 1 for single answers.',
  'completion/truncated': 'Share of the completions that ran into the token limit.',
  'completion/turns_cut': 'Share of the answers of an environment or agent that ran into the token limit of a turn.',
  'grading/{status}': (
    'Samples with this outcome: `ok`, `timeout` (time limit), `crash` (the process ended or met its memory limit), `error` (the '
    'grader raised) or `invalid` (no finite number).'
  ),
  'grading/failed/{name}': 'Samples that this one of several rewards could not grade. They do not train, unless its weight is 0.',
  'judge/requests': 'Requests to the judge for the samples of the step, repeated ones included.',
  'judge/retries': 'Requests that were repeated, because the endpoint was busy, failed or could not be reached.',
  'judge/tokens': 'Tokens that the judge read and wrote, as the endpoint counts them.',
  'judge/cost': 'Cost of these tokens in dollars, by the prices in `task.judge`. Present with prices.',
  'env/{name}': 'Mean of the value that the environment or agent calls `name`.',
  'agent/branches': 'Mean number of sequences of an episode: one for each conversation that does not continue a known one.',
  'agent/turns': 'Mean number of answers of an episode, in all its sequences.',
  'agent/tokens_dropped': 'Mean tokens of an episode that are not trained: beyond task.branches, or read by no client.',
  'agent/cut': 'Share of the episodes in which a limit of turns or tokens refused a request. If the agent raises, it gets 0.',
  # --- update -----------------------------------------------------------------------------------------------------------
  'policy/entropy': "Mean entropy of the learner's distribution over the tokens that the sampler's filters kept, in nats.",
  'policy/ratio_mean': 'Mean of `r`.',
  'policy/ratio_deviation': 'Mean of `|r - 1|`.',
  'policy/kl': 'Mean of `-log r`.',
  'policy/k3_kl': 'Mean of `r - 1 - log r`, a KL estimate that is never negative.',
  'policy/ess': 'Effective sample size of `r`, from 0 to 1.',
  'policy/clip_fraction': 'Share of the tokens whose loss a bound changed. Tokens with advantage 0 do not count.',
  'policy/kl_ref': 'Mean KL to the reference model, by the estimator of the settings. Present only with a KL term.',
  'update/loss': 'Loss of the update.',
  'update/grad_norm': 'Global gradient norm before clipping.',
  'update/skipped': '1 if the gradient or the loss was not finite and the step was skipped.',
  'update/bad_streak': 'Consecutive skipped updates, this one included. The largest of the step.',
  'optimizer/learning_rate': (
    'Learning rate of the last update of the step. A minibatch without groups advances the schedule. A skipped update does not: '
    'this is then the rate that it would have had, and the next update has the same. Absent if the step had no update.'
  ),
  'policy/random_weights': '1: the run began with random weights (`config.model.path=random:...`). Absent in all other runs.',
  'tokens/sampled': (
    'Tokens that the model wrote for the steps so far, with those of dropped samples (`async/dropped_tokens`) and those of '
    'agents that are not trained (`agent/tokens_dropped`). Not those of attempts that failed and were repeated.'
  ),
  'tokens/trained': 'Tokens that the model wrote and the updates so far saw. Several epochs count a token once.',
  # --- mismatch: the two policies ---------------------------------------------------------------------------------------
  'rollout_corr/ppl_ratio': 'Mean over sequences of the ratio of perplexities.',
  'rollout_corr/kl': 'Mean of `-log rho`. A run stops if its absolute value exceeds 1 in two steps in a row.',
  'rollout_corr/k3_kl': 'Mean of `rho - 1 - log rho`.',
  'rollout_corr/policy_kl_error': 'Mean of `1/rho - 1 + log rho`.',
  'rollout_corr/js_divergence_error': 'Jensen-Shannon divergence, estimated by k3 against the even mixture of both policies.',
  'rollout_corr/chi2_token': 'Mean of `rho^2`, minus 1, over tokens.',
  'rollout_corr/chi2_seq': "Mean of the squared product of a sequence's `rho`, minus 1, over sequences.",
  'rollout_corr/token_mult_prob_error': 'Mean of `exp(|log rho|)`. 1 for equal policies.',
  'rollout_corr/abs_dlogp_mean': 'Mean of `|log rho|`.',
  'rollout_corr/abs_dlogp_p99': '99th percentile of `|log rho|`; the mean over the updates of the step.',
  'rollout_corr/abs_dlogp_max': 'Largest `|log rho|` of the step.',
  'rollout_corr/probs_pearson': "Correlation of the two policies' probabilities.",
  'rollout_corr/adv_signed_bias': 'Mean of advantage times `log rho`, over the mean absolute advantage.',
  'rollout_corr/corrected_fraction': 'Share of the surviving tokens whose weight is not 1. It is 1 if no token survives.',
  # --- mismatch: weights ------------------------------------------------------------------------------------------------
  f'{_WEIGHT}_mean': 'Mean of `w` after its bounds, before normalisation.',
  f'{_WEIGHT}_std': 'Standard deviation of `w`, clipped to [0, cap]; `icepop`: as applied.',
  f'{_WEIGHT}_eff_sample_size': 'Effective sample size of `w`, clipped to [0, cap]; `icepop`: as applied. From 0 to 1.',
  f'{_WEIGHT}_ratio_fraction_high': 'Share of the tokens whose raw `w` is above the cap.',
  f'{_WEIGHT}_ratio_fraction_low': 'Share of the tokens whose raw `w` is below the floor (`truncate`: 1 / cap).',
  # --- mismatch: rejection ----------------------------------------------------------------------------------------------
  f'{_REJECT}_masked_fraction': 'Share of the tokens that rejection removed.',
  f'{_REJECT}_seq_masked_fraction': 'Share of the sequences that lost at least one token to rejection.',
  f'{_REJECT}_{{option}}_mean': 'Of each rejection option: mean of its statistic (`k1` is `log rho`).',
  f'{_REJECT}_{{option}}_masked_fraction': 'Share of the tokens that this option removed.',
  # --- the cache --------------------------------------------------------------------------------------------------------
  'sparse/kept_mean': 'Mean number of cached tokens that a drawn token attended to, in layers without a sliding window.',
  'sparse/kept_peak': 'Largest number of cached tokens that a drawn token attended to, in layers without a sliding window.',
  'sparse/accounting_saving': 'Share of the attended tokens that eviction saved against a dense cache.',
  'sparse/compressed': 'Share of the sequences from which tokens were evicted.',
  'sparse/cache_bytes': 'Bytes of the cache of all rows.',
  'sparse/bytes_saving': 'Share of the bytes saved against a dense, unquantised cache of the same rows.',
  'sparse/repetition': "Longest n-gram that occurs twice, over the completion's length. Near 1 in an endless loop.",
  'sparse/veto_fraction': 'Share of the sequences that the veto removed. 0 without a veto.',
  'sparse/catastrophic_sequence_fraction': (
    'Share of the sequences with a token whose `rho` is below the veto (1e-4 if no veto is set).'
  ),
  'sparse/ess': 'Effective sample size of `min(rho, 2)`, from 0 to 1. It is the same for all settings of the correction.',
  'sparse/agreement_mean': 'Mean agreement, `exp(-|log rho|)`, from 0 to 1.',
  'sparse/agreement_p05': '5th percentile of the agreement; the mean over the updates of the step.',
  'fp8/kv_saturation': 'Share of the cached numbers that FP8 clamped. A run stops above 1e-4; with frozen scales it warns.',
  'fp8/query_saturation': 'Share of the numbers of FP8 queries that FP8 clamped. Limit as for `fp8/kv_saturation`.',
  'fp8/codes_changed_fraction': "Share of the middle layer's FP8 weight codes that the update changed.",
  'fp8/scale_{tensor}/{layer}': 'Scale of the FP8 cache for `q`, `k` or `v` in this layer.',
  # --- mixtures of experts ----------------------------------------------------------------------------------------------
  'moe/load_max': 'Load of the busiest expert over the mean load.',
  'moe/load_max_worst': 'The same for the layer in which it is largest.',
  'moe/load_entropy': 'Entropy of the loads over the entropy of an even load.',
  'moe/router_entropy': "Mean entropy of the router's distributions, over the entropy of a uniform one.",
  'moe/unused': 'Mean number of experts that no token used.',
  'moe/balance_loss': 'Load-balance loss of all tokens. 1 for an even load.',
  # --- ledger -----------------------------------------------------------------------------------------------------------
  'ledger/{part}_mean': 'Mean of the entry over tokens. The mean of -`gap` estimates KL(sampler || learner).',
  'ledger/{part}_abs': 'Mean absolute value of the entry.',
  'ledger/{part}_p99': '99th percentile of the absolute value.',
  # --- scheduler --------------------------------------------------------------------------------------------------------
  'async/age_mean': 'Mean age of the groups in the batch, in steps.',
  'async/age_max': 'Largest age of a group in the batch, in steps.',
  'async/token_lag_mean': 'Mean number of steps between the weights that drew a token and the weights before this step.',
  'async/token_lag_max': 'Largest such number.',
  'async/stale_tokens': 'Share of the trained tokens that older weights drew.',
  'async/token_lag_counts': 'Number of tokens by lag: lag 0, lag 1, ... A list in `metrics.jsonl`.',
  'async/token_lag': 'The same numbers as a TensorBoard histogram.',
  'async/filtered': 'Groups replaced because their rewards are equal (`rollout.equal_groups=replace`).',
  'async/expired': 'Groups that became too old (order `completion`).',
  'async/surplus': 'Redundant groups that the step did not need.',
  'async/failed': 'Groups given up after a member failed too often.',
  'async/started': 'Groups started.',
  'async/errors': 'Calls of environments, and agents, that failed.',
  'async/hung': 'Calls of environments, and agents, that exceeded their time limit.',
  'async/aborted_tokens': 'Tokens drawn by requests that were aborted.',
  'async/resumed_tokens': 'Tokens of interrupted requests that were kept and continued.',
  'async/dropped_prompts': 'Groups that were dropped: the sum of `filtered`, `expired`, `surplus` and `failed`.',
  'async/dropped_members': (
    'Samples without any use: redundant members that were stopped, members lost after failures, and members of dropped groups.'
  ),
  'async/dropped_tokens': 'Tokens that these samples had drawn.',
  'async/dropped_graded': 'How many of these samples had been graded.',
  'async/dropped_length_bias': (
    'The ratio `length_consumed / length_started`, minus 1. Negative: shorter samples were preferred. The true bias is at most '
    'this value, because stopped samples count with a lower bound. Absent if nothing was trained.'
  ),
  'async/dropped_reward_bias': (
    'Mean reward of the trained samples, minus the mean reward of all graded samples. Dropped samples that were not graded are '
    'left out. Absent if samples were dropped and none of them had been graded. With `rollout.members=all` the trained samples '
    'are a random part, so both biases vary around 0.'
  ),
  'async/first_length_bias': (
    'What `rollout.members=first` would have done to the length: mean tokens of the first `rollout.group` members to finish, '
    'divided by the mean of all members, minus 1. Exact, because all members end. Present with `rollout.members=all`.'
  ),
  'async/first_reward_bias': (
    'What `rollout.members=first` would have done to the reward: mean reward of the first `rollout.group` members to finish, '
    'minus the mean of all members. Exact. Present with `rollout.members=all`.'
  ),
  'async/live': 'Groups that are running or complete and not consumed.',
  'async/length_consumed': 'Mean number of tokens of the trained samples.',
  'async/length_started': 'Mean number of tokens of all samples that drew any: trained, withheld and dropped.',
  'engine/occupancy': 'Share of the row-steps that drew a token.',
  'engine/chunks': 'Chunks of decode steps.',
  'engine/prefills': 'Prompt batches that were prefilled.',
  'engine/read_tokens': 'Tokens of prompts and given tokens that engines read.',
  'engine/prefix_hits': 'Turns that went on from the cache of the turn before.',
  'engine/prefix_misses': 'Turns that read all tokens again, because the cache was gone or held other tokens.',
  'engine/prefix_tokens': 'Tokens of kept caches that were not read again.',
  # --- packing ----------------------------------------------------------------------------------------------------------
  'packing/waste': 'Share of the positions that hold no token.',
  'packing/tokens': 'Tokens in the rows.',
  'packing/microbatches': 'Microbatches of the update.',
  'packing/tokens_saved_by_sharing': 'Prompt tokens saved because samples of a group share their prompt.',
  # --- evaluation -------------------------------------------------------------------------------------------------------
  'data/{name}/share': "Share of the step's trajectories whose problems are from the source.",
  'data/{name}/reward': 'Mean of the known rewards of these trajectories. Absent in a step that has none.',
  'eval/{set}/{metric}': 'The metric `eval/{metric}` of another held-out set.',
  'eval/avg@k': "Mean score over problems. Each problem's samples are averaged first.",
  'eval/low': 'Lower end of the 95 % confidence interval of `eval/avg@k`. Absent if it is infinite (sprl/io/pass_at_k.py).',
  'eval/high': 'Upper end of that interval. Absent with the lower end.',
  'eval/pass@{j}': 'Estimated chance that at least one of `j` samples gets full marks, for `j` = 1 and the number of samples.',
  'eval/problems': 'Number of problems.',
  'eval/samples': 'Samples per problem.',
  'eval/length_mean': 'Mean number of tokens that the model wrote.',
  'eval/truncated': 'Share of the completions that ran into the token limit.',
  'eval/ungraded': 'Completions of which a grader failed, so that this reward counts 0.',
  'eval/judge/{name}': 'As `judge/{name}`, for the samples of the evaluation.',
  'eval/reward/{name}': 'Mean score by one of several rewards (`task.rewards`). The other scores count the first of them.',
  # --- time -------------------------------------------------------------------------------------------------------------
  'time/rollout': 'From the start of the step until its batch is complete.',
  'time/ledger': 'Mismatch ledger.',
  'time/learn': 'Learner: pack, score, update.',
  'time/pack': 'Part of `learn`: advantages and packing.',
  'time/score': 'Part of `learn`: old and reference log-probs.',
  'time/update': 'Part of `learn`: gradient and optimiser.',
  'time/calibrate': 'Part of `sync`: scales of the FP8 cache.',
  'time/sync': 'New scales of an FP8 cache, and new weights from the learner to the engines.',
  'time/log': 'Metrics of the step.',
  'time/batch_wait': 'Time for which the controller waited for a batch.',
  'time/queue': 'Mean time for which a request waited for a row.',
  'time/learner_idle': 'Share of the step in which the learner was idle.',
  'time/rollout_idle': 'Share of the step in which an engine was idle, averaged over engines.',
  'time/tokens_per_second': (
    'Tokens that the engines drew, per second of rollout. With rollouts that run ahead: over the last eight steps, or as many as '
    'the window has, because one step may draw the samples of several.'
  ),
  'time/mfu_update': (
    "Model FLOPs of the step's updates, over `time/update` and the peak of the learner's devices in the compute dtype. The "
    'recomputation in the backward pass does not count. Absent if the peak is not known, as on CPUs.'
  ),
  'time/mfu_step': 'The same FLOPs, over the time of the whole step and the peak of all devices of the run.',
  'time/device_memory': 'Bytes in use on a device at the end of the step: the most of the devices of process 0. Absent on CPUs.',
  'time/device_memory_peak': 'Most bytes that were in use on such a device since the process started. Absent on CPUs.',
  'time/host_memory': "Bytes of the host's memory that process 0 holds, without its workers. Linux only.",
  'time/engine_host_share': "Share of an engine's time in which its devices waited for the host; a lower bound.",
}


def documented(name: str) -> str | None:
  """The entry of METRICS that covers the key `name`; None if there is none."""
  if name in METRICS:
    return name
  return next((entry for entry, pattern in _patterns().items() if pattern.fullmatch(name)), None)


def names(record: Mapping[str, Any]) -> Iterator[str]:
  """The metric names of one line of metrics.jsonl; keys without a prefix (`step`, `kind`) are not metrics."""
  yield from (name for name in record if '/' in name)
  yield from (f'time/{name}' for name in record.get('time', {}))


def undocumented(records: Iterable[Mapping[str, Any]]) -> list[str]:
  """The metric names in these lines of metrics.jsonl that have no entry, sorted."""
  return sorted({name for record in records for name in names(record) if documented(name) is None})


@cache
def _patterns() -> dict[str, re.Pattern[str]]:
  """Entries with braces as patterns; a brace matches anything but a slash."""
  return {
    entry: re.compile(''.join('[^/]+' if part.startswith('{') else re.escape(part) for part in re.split(r'(\{\w+\})', entry)))
    for entry in METRICS
    if '{' in entry
  }
