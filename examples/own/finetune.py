"""A classifier of transformers, fine-tuned without its Trainer. The model is tiny, random and made here, as the sentences are."""

import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import raydist.own as rd

STEPS, BATCH, TOKENS = 24, 16, 12

torch.manual_seed(0)
sentences = torch.randint(4, 100, (128, TOKENS))
labels = (sentences[:, 1] % 2).long()
lengths = torch.randint(4, TOKENS + 1, (128, 1))
masks = (torch.arange(TOKENS) < lengths).long()
dataset = [
    {"input_ids": ids, "attention_mask": mask, "labels": label}
    for ids, mask, label in zip(sentences, masks, labels, strict=True)
]
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=TOKENS,
)  # fmt: skip
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=STEPS)
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)

model.train()
with rd.session(model, optimizer, loader, steps=STEPS, clip=1.0, scheduler=scheduler, name="bert") as s:
    for batch in s:
        loss = model(**batch).loss
        s.backward(loss, weight=len(batch["labels"]))
        s.step()
        print(f"loss {loss.item():.4f}")
