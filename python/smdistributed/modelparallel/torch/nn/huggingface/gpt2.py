"""Translations of a GPT-2's state. They return it as it is, because its modules are the model's own."""


def translate_hf_state_dict_to_smdistributed(state_dict, max_seq_len=None):
    return state_dict


def translate_state_dict_to_hf_gpt2(state_dict, max_seq_len=None):
    return state_dict


translate_hf_state_dict_to_smdistributed_gpt2 = translate_hf_state_dict_to_smdistributed
translate_hf_block_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
translate_layer_state_dict_to_hf_gpt2_block = translate_state_dict_to_hf_gpt2


def get_hf_gpt2_transformer_layer_hooks():
    """Returns the hooks for smp.tp_register_with_module(), which has no effect."""
    return None, None, None
