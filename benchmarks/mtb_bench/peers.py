"""Other trainers around the same model, data and batches: logging and checkpoints off, AdamW's defaults."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .gate import Gate, total_steps
from .workload import LEARNING_RATE, build_model, get_batch, mean_loss

Batch = tuple[torch.Tensor, torch.Tensor]


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def accelerate() -> None:
    """Hugging Face accelerate: `Accelerator.prepare` and `Accelerator.backward`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1 + accelerator.process_index)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    gate = Gate(accelerator.process_index)
    for _ in range(gate.total_steps):
        x, y = get_batch()
        loss = mean_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        gate.step_done()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def fabric() -> None:
    """Lightning Fabric: `Fabric.setup` and `Fabric.backward`."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=_world(), strategy="ddp" if _world() > 1 else "auto")
    fabric.launch()
    torch.manual_seed(1 + fabric.global_rank)
    module = build_model()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE))
    gate = Gate(fabric.global_rank)
    for _ in range(gate.total_steps):
        x, y = get_batch()
        loss = mean_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gate.step_done()
    fabric.barrier()


def lightning_trainer() -> None:
    """Lightning's Trainer with everything optional off."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def training_step(self, batch: Batch, _index: int) -> torch.Tensor:
            return mean_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    class Batches:
        """An iterable without end; cheaper than a DataLoader."""

        def __iter__(self) -> Iterator[Batch]:
            while True:
                yield get_batch()

    class AtGate(lightning.Callback):
        gate: Gate

        def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
            torch.manual_seed(1 + trainer.global_rank)
            self.gate = Gate(trainer.global_rank)

        def on_train_batch_end(self, *_: Any) -> None:
            self.gate.step_done()

    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=_world(),
        strategy="ddp" if _world() > 1 else "auto",
        max_steps=total_steps(),
        callbacks=[AtGate()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), train_dataloaders=Batches())
