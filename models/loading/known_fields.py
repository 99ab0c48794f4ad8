"""The known fields of config.json, generation_config.json and GGUF headers.

A field is applied, or has one neutral value and is refused with another, or changes no result. Of
the others, those whose value asks for nothing are ignored. Those with a name that speaks of the
computation are refused, and the rest are named in a warning: published files have notes of many
programs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv.errors import UserError, first_few, warn
from jaxkv.models.loading.families import FAMILIES, LLAMA_FORM

if TYPE_CHECKING:
    from jaxkv.models.network.config import Config


def _by_name(*rows: tuple[tuple[Any, ...], str]) -> dict[str, tuple[Any, ...]]:
    """The neutral values of each field, from rows of these values and the names with them."""
    return {name: values for values, names in rows for name in names.split()}


# config.json, by family. Those of rope are in ROPE.
SHARED = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "original_max_position_embeddings", "dtype", "torch_dtype", "bos_token_id",
    "eos_token_id", "sink_logit",
}  # fmt: skip
QWEN_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
APPLIED: dict[str, set[str]] = {
    "llama": SHARED | {"attention_bias", "mlp_bias"},
    "mistral": SHARED | {"sliding_window"},
    "qwen2": SHARED | QWEN_WINDOWS,
    "qwen3": SHARED | QWEN_WINDOWS | {"attention_bias"},
}
ROPE = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "truncate", "partial_rotary_factor", "max_position_embeddings",
    "short_factor", "long_factor",
}  # fmt: skip
# Fields with a neutral value besides null. What they would change, jaxkv does not compute.
NEUTRAL = _by_name(
    ((1,), "partial_rotary_factor rotary_pct embedding_multiplier residual_multiplier "
           "logits_scaling logit_scale"),
    ((False,), "rope_interleaved rope_interleave alibi scale_embeddings parallel_residual "
               "use_parallel_residual use_bidirectional_attention is_encoder_decoder "
               "prefix_lm qk_ln attn_uses_sequence_id "
               "apply_residual_connection_post_layernorm "
               "add_cross_attention"),
    (("rope", "rotary", "relative"), "position_embedding_type"),
    (([],), "no_rope_layers"),
    ((), "attention_multiplier query_pre_attn_scalar attention_scale clip_qkv "
         "attention_chunk_size llama_4_scaling_beta softmax_scale"),
    ((0,), "attn_logit_softcapping final_logit_softcapping"),
    ((True,), "is_causal"),
    (({},), "per_layer_config quantization_config pruned_heads"),
    ((0, 1), "num_experts num_local_experts"),
    ((1.702,), "swiglu_alpha"),
)  # fmt: skip
# Neither change logits. Generation settings in config.json are read where generation_config.json
# is absent (sampling_settings.py).
HARMLESS = {
    "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "auto_map",
    "initializer_range", "use_cache", "pretraining_tp", "attention_dropout", "hidden_dropout",
    "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class",
    "prefix", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "return_dict", "output_hidden_states", "output_attentions",
    "chunk_size_feed_forward", "torchscript", "use_bfloat16", "tf_legacy_loss", "is_decoder",
    "tie_encoder_decoder", "cross_attention_hidden_size", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
    "use_flash_attn", "use_flash_attention", "is_llama_config", "transformers.js_config",
    "max_sequence_length", "model_max_length", "unsloth_version", "unsloth_fixed",
    "unsloth_processed", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "keys_to_ignore_at_inference", "gradient_checkpointing", "classifier_dropout",
    "custom_pipelines", "tokenizer_name", "init_config",
}  # fmt: skip

# generation_config.json. Settings that jaxkv lacks, with their values of no effect besides null.
SAMPLED = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
           "bos_token_id", "eos_token_id"}  # fmt: skip
NEUTRAL_SAMPLING = _by_name(
    ((1,), "num_beams num_beam_groups typical_p encoder_repetition_penalty"),
    ((0,), "diversity_penalty penalty_alpha epsilon_cutoff eta_cutoff no_repeat_ngram_size "
           "encoder_no_repeat_ngram_size min_length min_new_tokens"),
    ((), "top_h forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty"),
    (([],), "bad_words_ids force_words_ids constraints suppress_tokens begin_suppress_tokens "
            "stop_strings dola_layers"),
    (({}, []), "sequence_bias"),
    ((0, 1), "guidance_scale"),
    (({},), "watermarking_config"),
    ((False,), "token_healing"),
)  # fmt: skip
# Limits, speed, the form of the result, and what beams alone use.
HARMLESS_SAMPLING = {
    "max_length", "max_new_tokens", "max_time", "pad_token_id", "decoder_start_token_id",
    "transformers_version", "_from_model_config", "use_cache", "cache_implementation",
    "cache_config", "max_cache_len", "return_legacy_cache", "early_stopping", "length_penalty",
    "num_return_sequences", "renormalize_logits", "remove_invalid_values", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "speculation_type", "use_mtp", "compile_config", "disable_compile",
    "continuous_batching_config", "low_memory", "prefill_chunk_size", "trust_remote_code",
    "chat_format", "max_window_size", "user_token_id", "assistant_token_id",
}  # fmt: skip

# GGUF headers, after "ARCHITECTURE.".
GGUF_APPLIED = {
    "embedding_length", "feed_forward_length", "block_count", "context_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
GGUF_NEUTRAL = _by_name(
    ((0,), "expert_count expert_used_count expert_shared_count leading_dense_block_count "
           "nextn_predict_layers attention.scale attention.temperature_scale "
           "attention.temperature_length attn_logit_softcapping final_logit_softcapping "
           "attention.clamp_kqv attention.max_alibi_bias attention.shared_kv_layers "
           "attention.key_length_mla attention.value_length_mla rope.scaling.yarn_log_multiplier"),
    ((0, 1), "logit_scale residual_scale embedding_scale attention.output_scale "
             "attention.value_scale attention.sliding_window_pattern rope.scaling.alpha"),
    ((True,), "attention.causal"),
    ((), "attention.value_length rope.dimension_count attention.key_length_swa "
         "attention.value_length_swa rope.freq_base_swa rope.dimension_count_swa "
         "rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor"),
    ((False,), "use_parallel_residual swin_norm"),
    (("", "Meta AI original pth", "jploski"), "tensor_data_layout"),
    (("silu", "swish"), "hidden_activation"),
    (([], [0, 0, 0, 0]), "rope.dimension_sections"),
)  # fmt: skip
GGUF_HARMLESS = {"vocab_size", "rope.scaling.finetuned", "pooling_type", "embedding_length_out",
                 "classifier.output_labels"}  # fmt: skip
# general.sampling.*
GGUF_SAMPLED = {"temp", "top_k", "top_p", "min_p", "penalty_repeat"}
GGUF_NEUTRAL_SAMPLING = {"xtc_probability": (0,), "mirostat": (0,), "sequence": ("",)}
GGUF_HARMLESS_SAMPLING = {"xtc_threshold", "mirostat_tau", "mirostat_eta", "penalty_last_n"}


def check_config(
    fields: Mapping[str, Any], rope: Mapping[str, Any], config: Config, where: Path
) -> None:
    """Raise UserError for a field of config.json that would change the model; warn of unknown ones.

    fields: all fields of config.json, under the names of Llama. rope: its rope settings. config:
    the description they give.
    """
    family = FAMILIES.get(config.family, LLAMA_FORM)
    applied_here = SHARED | family.applied | {*family.renamed.values()}
    applied_here = APPLIED.get(config.family, applied_here - {*family.neutral})
    windowed = all(window is not None for window in config.windows)
    neutral = NEUTRAL | {
        "attention_multiplier": (config.head_dim**-0.5,),
        "query_pre_attn_scalar": (config.head_dim,),
        "attention_scale": (config.head_dim**-0.5,),
        "rotary_dim": (config.head_dim,),
        "no_rope_layers": ([], [1] * config.layers),
        "use_qk_norm": (config.qk_norm != "none",),
        "qk_layernorm": (config.qk_norm != "none",),
    }
    if "layer_types" not in applied_here:
        kind = "sliding_attention" if windowed else "full_attention"
        neutral |= {"layer_types": ([kind] * config.layers,), "use_sliding_window": (windowed,)}
    neutral = {name: values for name, values in neutral.items() if name not in applied_here}
    neutral |= family.neutral
    applied = applied_here | SAMPLED | set(NEUTRAL_SAMPLING) | HARMLESS_SAMPLING
    check(fields, neutral, applied | HARMLESS | {"window_rope", "picture_token_id"}, where)
    check(rope, neutral, ROPE | applied_here | {"finetuned"}, where)


def check(
    fields: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    supported: Collection[str],
    where: Path,
) -> None:
    """Raise UserError for a value that changes results, or may; warn of other unknown fields."""
    for name, value in fields.items():
        if name in neutral and not _is_one(value, neutral[name]):
            values = " or ".join(f"{v!r:.60}" for v in neutral[name]) or "absent"
            raise UserError(
                f"{where}: {name} must be {values}, got {value!r:.60}: jaxkv does not compute "
                "anything else; use another model"
            )
    unknown = {name for name in fields if name not in neutral and name not in supported}
    strange = unknown - OF_FAMILIES
    computes = [name for name in strange if fields[name] not in EMPTY and COMPUTES.search(name)]
    if computes:
        name = min(computes)
        raise UserError(
            f"{where}: unknown field {name}, got {fields[name]!r:.60}: it may change the result; "
            "use another model, or delete the field if it changes nothing"
        )
    warn_of(f"{where}: these fields have no effect", fields, unknown)


def warn_of_sampling(
    settings: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    supported: Collection[str],
    where: Path,
) -> None:
    """Warn of sampling settings that have no effect; as defaults, they refuse no model."""
    missing = {
        name
        for name, value in settings.items()
        if (not _is_one(value, neutral[name]) if name in neutral else name not in supported)
    }
    warn_of(f"{where}: answers are sampled without", settings, missing)


def warn_of(message: str, fields: Mapping[str, Any], names: Iterable[str]) -> None:
    """Warn, in one line, of those fields whose value asks for something."""
    shown = [f"{n} {fields[n]!r:.40}" for n in fields if n in set(names) and fields[n] not in EMPTY]
    if shown:
        warn(f"{message}: {first_few(shown)}")


EMPTY = (None, False, 0, "", [], {})
# Fields of some family: another family ignores them, and says so.
OF_FAMILIES = set().union(*APPLIED.values(), *(family.applied for family in FAMILIES.values()))
# What changes results has such a word in its name, in files of all families so far.
COMPUTES = re.compile(
    "expert|router|rope|rotary|norm|scal|bias|soft_?cap|logit|alibi|residual|gat(e|ing)|sink|clip|"
    "multiplier|sliding|attn_|attention_"
)


def _is_one(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is null or one of these; floats may differ by their rounding to float32."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return any(type(value) is type(allowed) and value == allowed for allowed in values)
    numbers = (v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    return any(abs(value - number) <= 1e-6 * abs(number) for number in numbers)
