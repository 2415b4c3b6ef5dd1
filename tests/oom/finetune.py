"""Fine-tunes with peft, trl, sentence-transformers and accelerate: finetune.py KIND [fix].

KIND is lora, sft, dpo, negatives, find or outputs.
"""

import os
import sys
import tempfile

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 4))
FOLDER = tempfile.mkdtemp()
TRAINS = {"max_steps": STEPS, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}


def llama(vocabulary=8192, layers=6):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {name: at for at, name in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(200))])}
    core = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def text(words):
    return " ".join(f"w{n % 200}" for n in range(words))


def lora():
    """Adapters need little memory, but the activations of the frozen model need as much as before."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama().bfloat16(), LoraConfig(r=16, target_modules="all-linear")).cuda()
    if FIX:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for _ in range(STEPS):
        ids = torch.randint(0, 8192, (8, 1024), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sft():
    """A large vocabulary: the logits are most of the peak."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(FOLDER, per_device_train_batch_size=2 if FIX else 8, max_length=512, **TRAINS)
    data = Dataset.from_dict({"text": [text(512)] * 64})
    SFTTrainer(llama(32768), arguments, train_dataset=data, processing_class=tokenizer()).train()


def dpo():
    """Preferences: the policy, its reference model, and two answers for each prompt."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(FOLDER, per_device_train_batch_size=1 if FIX else 4, max_length=512, **TRAINS)
    data = Dataset.from_dict(
        {"prompt": [text(64)] * 32, "chosen": [text(400)] * 32, "rejected": [text(300)] * 32}
    )
    trainer = DPOTrainer(llama(), llama(), args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()


def negatives():
    """A contrastive loss, which needs a large batch."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    config = BertConfig(
        vocab_size=8192, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    BertModel(config).save_pretrained(FOLDER)
    tokenizer().save_pretrained(FOLDER)
    words = Transformer(FOLDER, max_seq_length=128)
    model = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())])
    loss = (
        losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=32)
        if FIX
        else losses.MultipleNegativesRankingLoss(model)
    )
    data = Dataset.from_dict({"anchor": [text(128)] * 256 * STEPS, "positive": [text(128)] * 256 * STEPS})
    arguments = SentenceTransformerTrainingArguments(FOLDER, per_device_train_batch_size=256, **TRAINS)
    SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss).train()


def find():
    """accelerate halves the batch until it fits."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=32)
    def train(batch_size):
        accelerator.free_memory()
        model = llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(STEPS):
            ids = torch.randint(0, 8192, (batch_size, 256), device=accelerator.device)
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
        print("batch", batch_size)

    train()


def outputs():
    """The outputs of each batch are kept for a report after the epoch."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    results = []
    for _ in range(STEPS):
        ids = torch.randint(0, 8192, (4, 256), device=accelerator.device)
        result = model(input_ids=ids, labels=ids)
        accelerator.backward(result.loss)
        optimizer.step()
        optimizer.zero_grad()
        results.append(result.loss.item() if FIX else result)


{f.__name__: f for f in (lora, sft, dpo, negatives, find, outputs)}[KIND]()
