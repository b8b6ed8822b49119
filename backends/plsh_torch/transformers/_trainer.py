"""Blocks of their own for each training step."""

from typing import Any

from transformers import TrainerCallback

from ._settings import ATTRIBUTE, Settings


def set_step(model: Any, step: int | None) -> None:
    """Draw the blocks of lsh from (seed, layer, step) from now on; None: from (seed, layer).

    Set it before a step's forward and leave it until its backward is done: gradient checkpointing
    computes the forward again.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Switched by `switch`.
    step : int or None
        In ``[0, 2**64)``.

    Raises
    ------
    TypeError
        The model isn't switched.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from plsh_torch.transformers import switch
    >>> config = LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    ...     vocab_size=9,
    ... )
    >>> set_step(switch(LlamaForCausalLM(config), "lsh"), 7)
    """
    found: list[Settings] = [
        getattr(module, ATTRIBUTE) for module in model.modules() if hasattr(module, ATTRIBUTE)
    ]
    if not found:
        raise TypeError(
            "model must be switched before a step is set: plsh_torch.transformers.switch(model, "
            "'lsh')"
        )
    for settings in found:
        settings.step = step


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """For the library's Trainer: each optimisation step has blocks of its own.

    Evaluation sees the blocks of the last step before it.
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Set the step's number."""
        set_step(keywords["model"], state.global_step)
