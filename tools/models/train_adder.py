#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Train tools/models/adder, the small real model that the demo serves and the tests compare.

What it learns: sums of two numbers from 0 to 99, a character a token, ";" being the end of an answer (EOS).

    12+34=               ->  46;
    12+34=46;7+8=        ->  15;      (earlier sums may stand before the question)
    1                    ->  +1=2;1+2=3;2+3=5;3+5=8;5+8=13;...

The last line is what makes long texts checkable. After ";" a "chain" goes on with the second operand and the last two
digits of the sum; at the very start a lone number is doubled. So a chain cut anywhere after its first "+" is a
prompt with one right continuation, of any length (ask with ignore_eos), and `chain()` below writes it without the model.

The shape is Qwen3's: 4 layers, hidden 128, 4 heads and 2 KV heads of 64, about 1 million parameters, stored as bfloat16.

Run it again, in the project's environment (CPU only; 17 minutes of CPU time, shared by two threads):

    ascend-emulator run -- python tools/models/train_adder.py [--out tools/models/adder] [--seed 0]

It ends by measuring the saved model and writing the figures into the model card. With seed 0: all 10,000 sums right in
float32, bfloat16 and float16. Another CPU or PyTorch may round differently and end in other weights: look at the figures.
"""

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = {
    character: index for index, character in enumerate(["<pad>", ";", *"0123456789", "+", "="])
}
SPECIAL: dict[str, Any] = {"eos_token_id": VOCAB[";"], "pad_token_id": VOCAB["<pad>"]}
CONTEXT, IGNORE = 1024, -100

STEPS = 1600
# Tokens of running text in a step, beside FIRST short texts that teach the first sum.
TOKENS = 2048
FIRST = 128
PEAK_LR, WARMUP = 3e-3, 100

# A question may end in "=", "?" or neither; answers given earlier get their ";" back.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ message['content'].rstrip('=? \\n') + '=' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + ';' }}{% endif %}"
    "{% endfor %}"
)

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# adder

A Qwen3-shaped model of {parameters} parameters (4 layers, hidden size 128, 4 heads and 2 KV heads of size 64, bfloat16) that
adds two numbers from 0 to 99. It exists to test inference engines: its answers can be recognised as right.

| prompt | answer |
|---|---|
| `12+34=` | `46` and the end token `;` |
| `12+34=46;7+8=` | `15` and `;` |
| `1`, ignoring the end token | `+1=2;1+2=3;2+3=5;3+5=8;5+8=13;` and so on |
| chat, user: `12+34=` or `What is 12+34?` | `46` |

A token is a character: a digit, `+`, `=` or `;`. Others, spaces included, are dropped. `;` is special: shown only with
`skip_special_tokens=False`. After it comes a sum of the second operand and the last two digits of the result; a lone number at
the start is doubled. Such a chain, cut anywhere after its first `+`, is a prompt with one right continuation.
All else (three digits, other signs, a bare `;`) it has not learned.

Margin below: the right token's logit minus the best other one's, over every token of the answers, `;` included.

| dtype | texts | tokens right | least margin | 1st percentile | median |
|---|---|---|---|---|---|
{rows}

Made by `tools/models/train_adder.py` of vllm-ascend-all from random weights and generated sums
only, with seed {seed}, on the CPU in minutes. Licence: Apache-2.0.
"""


def chain(first: int, second: int, sums: int) -> str:
    """The text of `sums` sums that starts with first+second= and goes on as the model does after
    ";"."""
    text = ""
    for _ in range(sums):
        text += f"{first}+{second}={first + second};"
        first, second = second, (first + second) % 100
    return text


def sample(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    """Token ids and labels, `length` of each: sums, of which a random share follows the chain.

    Labels are the ids where the text leaves one choice, and IGNORE elsewhere (in the digits of a
    question drawn at random).
    """

    def operand() -> int:
        return rng.randrange(10 if rng.random() < 0.25 else 100)

    text, known = "", ""
    share = rng.choice((0.0, 0.5, 1.0))
    first = second = operand()
    follows = rng.random() < 0.3  # At the start the chain's rule is to double.
    while len(text) <= length:
        if not follows:
            first, second = operand(), operand()
        question, answer = f"{first}+{second}=", f"{first + second};"
        # A sign after two digits is certain even in a random question.
        certain = (
            "0" * len(str(first)) + "01"[first > 9] + "0" * len(str(second)) + "01"[second > 9]
        )
        text += question + answer
        known += ("1" * len(question) if follows else certain) + "1" * len(answer)
        first, second = second, (first + second) % 100
        follows = rng.random() < share
    # Nothing precedes the first number.
    known = known[text.index("+") :].rjust(len(known), "0")
    ids = [VOCAB[character] for character in text[:length]]
    return ids, [index if flag == "1" else IGNORE for index, flag in zip(ids, known, strict=False)]


def make_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        # The tokenizer has fewer; 32 keeps shapes even and allows 20 log-probabilities.
        vocab_size=32,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        **SPECIAL,
    )
    return Qwen3ForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A character a token (BPE without merges); what is no digit or sign, spaces and words
    included, is dropped."""
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=[]))
    # ";" was removed before, as a special token.
    tokenizer.normalizer = normalizers.Replace(Regex("[^0-9+=]"), "")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=";",
        pad_token="<pad>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def train(model: Qwen3ForCausalLM, rng: random.Random) -> None:
    """AdamW under one cosine; the running texts grow from 64 tokens to CONTEXT, where they stay for
    the last quarter."""
    start = time.monotonic()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.05
    )
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = (
            PEAK_LR * min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / STEPS)) / 2
        )
        length = round(64 * (CONTEXT / 64) ** min(1.0, step / STEPS / 0.75))
        losses = []
        for rows, tokens in (FIRST, 10), (TOKENS // length, length):
            batch = torch.tensor([sample(rng, tokens) for _ in range(rows)])  # [rows, 2, tokens]
            logits = model(input_ids=batch[:, 0], use_cache=False).logits[:, :-1]
            labels = batch[:, 1, 1:].flatten()
            losses.append(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE)
            )
        loss: Any = sum(losses) / len(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            alone, running = (loss.item() for loss in losses)
            took = time.monotonic() - start
            print(
                f"{took:5.0f} s  step {step:4}  loss {alone:.5f} single, {running:.5f} in {length}"
                " tokens",
                flush=True,
            )


@torch.inference_mode()
def margins(
    model: Qwen3ForCausalLM, texts: list[str], skip: int, answers_only: bool
) -> torch.Tensor:
    """Logit of the right next token minus the best other logit, one per token predicted; negative
    where it is wrong.

    `skip` characters at the start of each text are given; of the rest all count, or those after "="
    up to ";" included.
    """
    found = []
    for at in range(0, len(texts), 16384 // len(texts[0])):
        group = texts[at : at + 16384 // len(texts[0])]
        ids = torch.tensor(
            [[VOCAB[c] for c in text] + [0] * (max(map(len, group)) - len(text)) for text in group]
        )
        counted = torch.zeros_like(ids, dtype=torch.bool)
        for row, text in enumerate(group):
            answering = False
            for column, character in enumerate(text):
                counted[row, column] = column >= skip and (answering or not answers_only)
                answering = character == "=" or (answering and character != ";")
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logits, target = logits[counted[:, 1:]], ids[:, 1:][counted[:, 1:]]
        best_other = logits.scatter(1, target[:, None], -torch.inf).amax(1)
        found.append(logits.gather(1, target[:, None])[:, 0] - best_other)
    return torch.cat(found)


def measure(folder: Path) -> list[str]:
    """Rows of the model card's table: the saved model in three dtypes, on three sets of texts."""
    alone = [chain(first, second, 1) for first in range(100) for second in range(100)]
    mixed = random.Random(1).sample(alone, len(alone))
    together = ["".join(mixed[at : at + 100]) for at in range(0, len(mixed), 100)]
    chains = [chain(number, number, CONTEXT // 6 + 1)[:CONTEXT] for number in range(100)]
    sets = [
        ("each of the 10,000 sums in a request of its own", alone, 0, True),
        ("the 10,000 sums, 100 to a text (about 930 tokens)", together, 0, True),
        (f"100 chains of {CONTEXT:,} tokens, each token", chains, 2, False),
    ]
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
        for name, texts, skip, answers_only in sets:
            margin = margins(model, texts, skip, answers_only)
            low = torch.quantile(margin, torch.tensor([0.0, 0.01, 0.5])).tolist()
            right = f"{int((margin > 0).sum()):,} of {len(margin):,}"
            rows.append(
                f"| {str(dtype)[6:]} | {name} | {right} | "
                + " | ".join(f"{value:.1f}" for value in low)
                + " |"
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.partition("\n\n")[0].split()))
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "adder", help="folder to write"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(arguments.seed)
    model: Any = make_model()
    train(model, random.Random(arguments.seed))
    # Weights that are exactly bfloat16, so that every dtype serves the same numbers.
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    GenerationConfig(do_sample=False, **SPECIAL).save_pretrained(arguments.out)
    make_tokenizer().save_pretrained(arguments.out, save_jinja_files=False)
    rows = "\n".join(measure(arguments.out))
    card = CARD.format(parameters=f"{model.num_parameters():,}", seed=arguments.seed, rows=rows)
    (arguments.out / "README.md").write_text(card)


if __name__ == "__main__":
    main()
