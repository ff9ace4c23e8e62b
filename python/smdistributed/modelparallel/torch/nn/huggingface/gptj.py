"""Translations of a GPT-J's state. They return it as it is, because its modules are the model's own."""


def translate_hf_gptj_state_dict_to_smdistributed(state_dict, max_seq_len=None):
    return state_dict


def translate_state_dict_to_hf_gptj(state_dict, max_seq_len=None):
    return state_dict
