"""Choices for single families, by folder, that names of fields and of forward's parameters do not give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

AHEAD = {"prediction_length": 8, "context_length": 16}
ALL_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
SWIN = {"patch_size": 2, "window_size": 2}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
DETR = {"use_timm_backbone": False, "backbone_config": RESNET | {"out_features": ["stage4"]}}
LEVELS = {"backbone_config": RESNET | {"out_features": ["stage2", "stage3", "stage4"]}, "use_timm_backbone": False}


def _sections(*sections: int) -> Mapping[str, Any]:
    """Of rotary positions in time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"text_config": {"rope_parameters": rope}}


CODES = range(16)
"""Entries of a codebook of images, which have a token each."""
CODE_TOKENS = {f"IMGIMG{str(i).translate(str.maketrans('0123456789', 'ABCDEFGHIJ'))}Z": 101 + i for i in CODES}
GEMMA_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
FOUR_LAYERS = {"backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}}
PINPOINTS = {"image_grid_pinpoints": [[32, 32]]}

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "apertus1p5": {
        "image_token_offset": 64,
        "audio_token_offset": 80,
        "image_token_id": 100,
        "audio_token_id": 101,
        "vision_config": {"codebook_size": 16},
        "audio_config": {"codebook_size": 16, "num_filters": 8},
    },
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "autoformer": AHEAD,
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "blip_2": {"image_token_index": 100},
    "bridgetower": {"hidden_size": 64, "vision_config": {"hidden_size": 64}, "text_config": {"hidden_size": 64}},
    "chameleon": {"vocabulary_map": {"<image>": 100, **CODE_TOKENS}, "vq_config": {"num_embeddings": len(CODES)}},
    "chmv2": FOUR_LAYERS,
    "conditional_detr": DETR,
    "cvt": {"depth": (1, 2, 3)},
    "cosmos3_edge": _sections(2, 1, 1),
    "dab_detr": DETR,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deformable_detr": LEVELS,
    "depth_anything": FOUR_LAYERS,
    "detr": DETR,
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0, 1], "num_pos_feats": 16}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut": SWIN,
    "dots1": ALL_EXPERTS,
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.25, "hidden_dim": 320},
    "embedding_gemma2": {"vision_config": GEMMA_VISION},
    "emu3": {
        "vocabulary_map": {"<image>": 100, "<|extra_200|>": 99} | {f"<|visual token {i:06}|>": 101 + i for i in CODES},
        "vq_config": {"codebook_size": len(CODES), "hidden_size": 128},
    },
    "esm": {"vocab_size": 128, "mask_token_id": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma4": {"vision_config": GEMMA_VISION},
    "gemma4_unified": {
        "vision_config": {"patch_size": 8, "pooling_kernel_size": 2, "mm_embed_dim": 32}
        | {"mm_posemb_size": 64, "output_proj_dims": 32}
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "glm46v": _sections(2, 1, 1),
    "glm4v": _sections(2, 1, 1),
    "glm4v_moe": _sections(1, 1, 0),
    "glm_ocr": _sections(2, 1, 1),
    "glmga": _sections(2, 1, 1),
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "granitemoehybrid": {"mamba_d_head": 16, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hy_v4_vl": _sections(1, 1, 0),
    "hunyuan_vl": {"text_config": {"head_dim": 8, **_sections(1, 1, 1, 1)["text_config"]}},
    "informer": AHEAD,
    "instructblip": {"image_token_index": 100},
    "instructblipvideo": {"video_token_index": 100},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kosmos2": {"latent_query_num": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "llama4": {"vision_config": {"intermediate_size": 128}},
    "llava_next": PINPOINTS,
    "llava_next_video": PINPOINTS,
    "llava_onevision": PINPOINTS,
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": 8},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    },
    "muse_glimmer": {"out_hidden_size": 128},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl": _sections(2, 1, 1),
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 192}},
    "prompt_depth_anything": FOUR_LAYERS,
    "qwen2_5_omni": _sections(2, 1, 1),
    "qwen2_5_vl": _sections(2, 1, 1),
    "qwen2_vl": _sections(2, 1, 1),
    "kimi_k25": {"vision_config": {"pos_emb_height": 8, "pos_emb_width": 8}},
    "voxtral": {"audio_token_id": 100, "audio_config": {"intermediate_size": 128}},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 2}
    | {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    "sam": {"vision_config": {"num_pos_feats": 16}},
    "sam_hq": {"vision_config": {"num_pos_feats": 16}},
    "seggpt": {"image_size": [64, 32]},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "swin": SWIN,
    "table_transformer": DETR,
    "time_series_transformer": AHEAD,
    "tipsv2_dpt": FOUR_LAYERS,
    "upernet": {"backbone_config": RESNET | {"out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "wav2vec2_bert": {"vocab_size": 128},
    "wav2vec2_conformer": {"vocab_size": 128},
    "xlstm": {
        "chunk_size": 4,
        "mode": "train",
        "return_last_states": False,
        "hidden_size": 128,
        "embedding_dim": 128,
        "num_heads": 2,
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zoedepth": FOUR_LAYERS,
    "vitmatte": {
        "convstream_hidden_sizes": [8, 16, 32],
        "fusion_hidden_sizes": [32, 16, 16, 8],
        "backbone_config": {"num_channels": 4, "patch_size": 16},
    },
    "sapiens2": {
        "head_config": {"upsample_out_channels": [16, 16], "upsample_kernel_sizes": [4, 4]}
        | {"conv_out_channels": [16], "conv_kernel_sizes": [1]}
    },
    "neomme": {"head_dim": 16},
    "lw_detr": {
        "projector_scale_factors": [1.0],
        "backbone_config": {"image_size": 64, "num_windows": 4, "num_hidden_layers": 4}
        | {"window_block_indices": [0, 2], "out_indices": [2, 4]},
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "moonshine_streaming": {
        "num_key_value_heads": 4,
        "encoder_config": {"sliding_windows": [[16, 4], [16, 0]]},
    },
    "glm5_next": {"text_config": {"index_topk": 16}},
    "depth_pro": {
        "image_model_config": {"image_size": 8},
        "patch_model_config": {"image_size": 8},
        "fov_model_config": {"image_size": 8},
    },
    "encodec": {"num_filters": 8},
    "timm_wrapper": {"architecture": "test_resnet"},
    "timm_backbone": {"backbone": "test_resnet"},
    "bros": {"hidden_size": 64},
}
"""Fields of configurations."""


def _patch_rows(maker: Any) -> dict[str, Any]:
    """Images of any shape, as rows of patches."""
    rows = {"pixel_values": maker.noise(2, 16, 3 * 8 * 8), "spatial_shapes": torch.tensor([[4, 4]] * 2)}
    return rows | {"pixel_attention_mask": torch.ones(2, 16, dtype=torch.long)}


def _merged_patches(maker: Any) -> dict[str, Any]:
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "image_merge_sizes": torch.tensor([2, 2])}
    return {"pixel_values": maker.noise(32, 3 * 8 * 8)} | grid


def _with_task(maker: Any) -> dict[str, Any]:
    images = maker.noise(2, 3, *maker.image_size())
    return {"pixel_values": images, "task_inputs": maker.tokens(maker.config.task_seq_len)}


def _resolutions(maker: Any) -> dict[str, Any]:
    return {name: maker.noise(2, 3, 32, 32) for name in ("pixel_values", "high_res_pixel_values")}


def _positioned(maker: Any) -> dict[str, Any]:
    """Patches of Gemma 4, each with its place."""
    places = torch.stack([torch.arange(4).repeat(4), torch.arange(4).repeat_interleave(4)], -1)
    size = 3 * (8 * (2 if "unified" in maker.family else 1)) ** 2
    return {"pixel_values": maker.noise(2, 16, size), "image_position_ids": places.expand(2, 16, 2).clone()}


def _of_codebook(maker: Any) -> dict[str, Any]:
    """Images for the model and for its codebook; the patches to be told."""
    images = {name: maker.noise(2, 3, 32, 32) for name in ("pixel_values", "codebook_pixel_values")}
    return images | {"bool_masked_pos": maker.integers(2, 2, 16)}


def _tiles(maker: Any) -> dict[str, Any]:
    return {"pixel_values": maker.noise(2, 1, 3, 32, 32), "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool)}


def _merged_pixels(maker: Any) -> dict[str, Any]:
    return {"pixel_values": maker.noise(8, 16, 16, 3), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}


def _framed_patches(maker: Any) -> dict[str, Any]:
    """A patch is of two frames."""
    return {"pixel_values": maker.noise(32, 2 * 3 * 8 * 8), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}


IMAGES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "deepseek_vl_hybrid": _resolutions,
    "embedding_gemma2": _positioned,
    "flava": _of_codebook,
    "fuyu": lambda maker: {"pixel_values": maker.noise(2, 4, 3 * 8 * 8)},
    "gemma4": _positioned,
    "gemma4_unified": _positioned,
    "granite_docling": _tiles,
    "inkling2": _merged_pixels,
    "inkling2_loop": _merged_pixels,
    "lfm2_vl": _patch_rows,
    "muse_glimmer": _framed_patches,
    "neomme": lambda maker: {"pixel_values": maker.noise(32, 3 * 8 * 8)},
    "oneformer": _with_task,
    "siglip2": _patch_rows,
    "video_llama_3": _merged_patches,
}
"""Images, beside which there may be text."""


def _frames(length: int, bins: int = 16, mask: str = "input_features_mask", rows: bool = False) -> Any:
    """Sounds as spectra of so many frames, none of them padding."""

    def made(maker: Any) -> dict[str, Any]:
        shape = (length, bins) if rows else (bins, length)
        return {"input_features": maker.noise(2, *shape)} | (
            {mask: torch.ones(2, length, dtype=torch.long)} if mask else {}
        )

    return made


def _chunks(maker: Any) -> dict[str, Any]:
    return _frames(128)(maker) | {"padding_mask": torch.ones(2, 800, dtype=torch.long)}


SOUNDS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "fun_asr_nano": _frames(16, 7 * 16, rows=True),
    "granite_speech": _frames(30, 32, mask="", rows=True),
    "granite_speech_plus": _frames(30, 32, mask="", rows=True),
    "moss_transcribe_diarize": _chunks,
    "qwen3_asr": _frames(100),
    "voxtral": _frames(128, mask=""),
}
"""Sounds, beside which there may be text."""


def _flat_patches(maker: Any) -> dict[str, Any]:
    places = torch.stack([torch.arange(1, 5).repeat_interleave(4), torch.arange(1, 5).repeat(4)], -1).float()
    patches = torch.cat([places.expand(2, 16, 2), maker.noise(2, 16, 3 * 8 * 8)], -1)
    return {"flattened_patches": patches, "labels": maker.tokens(6)}


def _journeys(maker: Any) -> dict[str, Any]:
    config = maker.config
    made = {"states": maker.noise(2, 5, config.state_dim), "actions": maker.noise(2, 5, config.act_dim)}
    made |= {"rewards": maker.noise(2, 5, 1), "returns_to_go": maker.noise(2, 5, 1)}
    return made | {"timesteps": torch.arange(5).expand(2, 5), "attention_mask": torch.ones(2, 5)}


def _regions(maker: Any) -> dict[str, Any]:
    made = maker.text() | {"visual_feats": maker.noise(2, 4, maker.config.visual_feat_dim)}
    return made | {"visual_pos": maker.noise(2, 4, maker.config.visual_pos_dim), "labels": made["input_ids"].clone()}


def _prompted(maker: Any) -> dict[str, Any]:
    return {name: maker.noise(2, 3, 32, 32) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")}


def _codes(maker: Any) -> dict[str, Any]:
    return {"input_ids": maker.integers(100, 2 * maker.config.num_codebooks, 12)}


def _voices(maker: Any) -> dict[str, Any]:
    """Text, and codes of a sound, one per channel."""
    config = maker.config.decoder_config
    return {"input_ids": maker.tokens(12), "decoder_input_ids": maker.integers(100, 2, 6, config.num_channels)}


def _text_and_codes(maker: Any) -> dict[str, Any]:
    return {"input_ids": maker.integers(100, 2, 12, maker.config.num_codebooks + 1)}


def _seen(maker: Any) -> dict[str, Any]:
    """Text that looks at one image each."""
    made = maker.text() | {"pixel_values": maker.noise(2, 1, 3, *maker.image_size())}
    made |= {"image_attention_mask": torch.ones(2, 12, 1, dtype=torch.long)}
    return made | {"labels": made["input_ids"].clone()}


def _with_places(maker: Any) -> dict[str, Any]:
    made = maker.text() | {"pixel_values": maker.noise(2, 3, *maker.image_size())}
    mask = torch.zeros(2, 12, dtype=torch.long)
    mask[:, 1:5] = 1
    return made | {"image_embeds_position_mask": mask, "labels": made["input_ids"].clone()}


def _one_tile(maker: Any) -> dict[str, Any]:
    """Text that looks at one image of one tile."""
    made = maker.text() | {"pixel_values": maker.noise(2, 1, 4, 3, 32, 32)}
    made |= {"aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long)}
    made |= {"aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]] * 2)}
    made |= {"cross_attention_mask": torch.tensor([1, 0, 0, 0]).expand(2, 12, 1, 4).clone()}
    return made | {"labels": made["input_ids"].clone()}


def _heard(maker: Any) -> dict[str, Any]:
    """Text around sounds, which the model counts in its forward alone."""
    mask = "feature_attention_mask" if maker.family == "qwen2_audio" else "input_features_mask"
    made = _frames(128, mask=mask)(maker) | maker.placed(maker.text(), maker.config.audio_token_id, 32)
    made |= {"attention_mask": torch.ones_like(made["input_ids"])}
    return made | {"labels": made["input_ids"].clone()}


def _spoken(maker: Any) -> dict[str, Any]:
    """Text around a sound, of which a codec makes frames."""
    length = 3840
    values, ends = maker.noise(2, 1, length), torch.full((2, 1), length)
    count = maker.model.codec_model.encode(values).audio_codes.shape[-1]
    made = maker.placed(maker.text(), maker.config.audio_token_id, count)
    return made | {"input_values": values, "input_values_cutoffs": ends, "labels": made["input_ids"].clone()}


def _bars(maker: Any) -> dict[str, Any]:
    return {"input_features": maker.noise(2, 8, maker.config.d_model), "labels": maker.tokens(6)}


def _questions(maker: Any) -> dict[str, Any]:
    made = maker.text() | {"question_positions": torch.tensor([[2], [3]])}
    return made | {"start_positions": torch.tensor([[1], [2]]), "end_positions": torch.tensor([[3], [4]])}


INPUTS: Mapping[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "csm": ("text, sounds", _spoken),
    "decision_transformer": ("states", _journeys),
    "dia": ("text, codes", _voices),
    "idefics": ("text, images", _seen),
    "kyutai_speech_to_text": ("text, codes", _text_and_codes),
    "kosmos2": ("text, images", _with_places),
    "lxmert": ("text, images", _regions),
    "mllama": ("text, images", _one_tile),
    "musicflamingo": ("text, sounds", _heard),
    "musicgen": ("codes", _codes),
    "musicgen_melody": ("codes", _codes),
    "pix2struct": ("images", _flat_patches),
    "pop2piano": ("sounds", _bars),
    "qwen2_audio": ("text, sounds", _heard),
    "seggpt": ("images", _prompted),
    "splinter": ("text", _questions),
}
"""All that forward takes, and what it is called in the table."""

KINDS: Mapping[str, tuple[str, str]] = {
    "musicgen": ("MusicgenForCausalLM", "musicgen_decoder"),
    "musicgen_melody": ("MusicgenMelodyForCausalLM", "musicgen_melody_decoder"),
}
"""Class, and type of its configuration, where that of the mappings is another's."""

NEEDS: Mapping[str, Sequence[str]] = {
    "timm": (
        "edgetam",
        "fast_vlm",
        "gemma3n",
        "omdet_turbo",
        "pe_audio_video",
        "pe_video",
        "perception_lm",
        "timm_backbone",
    )
    + ("timm_wrapper",),
    "scipy": ("eomt", "eomt_dinov3", "mask2former", "maskformer", "oneformer", "videomt"),
}
"""Libraries that need not be installed, and families that are skipped without them."""
