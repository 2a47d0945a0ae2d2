"""A model with LongRoPE behind the store says what transformers says, or refuses; nothing differs silently."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.tiny_models import save, tiny_model
from tests.support.daemon_process import Daemon

from .conftest import greedy, joined, random_ids, write_tokenizer

TRAINED, STEPS = 128, 40


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    sizes = {"original_max_position_embeddings": TRAINED, "max_position_embeddings": 1024}
    model = tiny_model("phi3", "longrope", **sizes, num_hidden_layers=3, eos_token_id=None)
    directory = save(model, tmp_path_factory.mktemp("phi3"))
    write_tokenizer(directory, model.config.vocab_size)
    return model, directory


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("prompt", "context"), [(TRAINED - STEPS, TRAINED), (TRAINED + 1, 1024), (600, 1024)])
def test_decoding_equals_transformers(phi3: tuple[Any, Path], daemon: Daemon, prompt: int, context: int) -> None:
    model, checkpoint = phi3
    ids = random_ids(prompt, prompt, model.config.vocab_size)
    asked = torch.tensor([ids])
    expected = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=STEPS, do_sample=False)
    with joined(daemon, checkpoint, policy="full", context=context) as engine:
        session, logits = engine.prefill(ids)
        assert greedy(engine, session, logits, STEPS) == expected[0, prompt:].tolist()
        engine.close_session(session)


@pytest.mark.timeout(60)
def test_a_short_prompt_under_a_long_context_is_refused(phi3: tuple[Any, Path], daemon: Daemon) -> None:
    model, checkpoint = phi3
    ids = random_ids(40, 7, model.config.vocab_size)
    with joined(daemon, checkpoint, policy="full", context=1024) as engine:
        for call in (engine.prefill, engine.attach, engine.compute_only):
            with pytest.raises(ValueError, match=f"the prompt has 40 tokens.*give --context {TRAINED} or less"):
                call(ids)
        assert engine.free_slots == 1
