"""Models for texts and pictures from three libraries: embeddings.py sentences|open_clip|x_transformers."""

import sys
import tempfile

import torch
from peaks import print_peak


def sentences():
    """sentence-transformers: encodes texts with a BERT that it loads from a folder."""
    import transformers as hf
    from made_up import tokenizer
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    with tempfile.TemporaryDirectory() as folder:
        config = hf.BertConfig(
            vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=512
        )
        hf.BertModel(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = Transformer(folder)
    pooling = Pooling(words.get_embedding_dimension())
    model = SentenceTransformer(modules=[words, pooling], device="cuda")
    texts = [" ".join(f"w{n}" for n in range(length)) for length in range(1, 33)]
    print(model.encode(texts, batch_size=8).shape)


def open_clip():
    """OpenCLIP: training with its contrastive loss."""
    from open_clip import ClipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=4, width=256, head_width=32, patch_size=32, image_size=224)
    text = CLIPTextCfg(context_length=32, vocab_size=1024, width=256, heads=8, layers=4)
    model = CLIP(128, vision, text, output_dict=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        ids = torch.randint(1, 1024, (8, 32), device="cuda")
        out = model(torch.randn(8, 3, 224, 224, device="cuda"), ids)
        ClipLoss()(**out).backward()
        optimizer.step()
        optimizer.zero_grad()


def x_transformers():
    """x-transformers: an autoregressive model, trained and sampled."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=256, depth=4, heads=8, rotary_pos_emb=True, attn_flash=True)
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=1024, max_seq_len=256, attn_layers=layers)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randint(0, 1024, (4, 256), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(tuple(model.generate(torch.zeros(2, 1, dtype=torch.long, device="cuda"), 16).shape))


torch.manual_seed(0)
globals()[sys.argv[1]]()
print("done")
print_peak()
