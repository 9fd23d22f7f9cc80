"""A training as a plain function: its keyword arguments are the settings."""


def train(ctx, learning_rate: float = 0.01, num_epochs: int = 3, fold: int = 1) -> dict[str, float]:
    """Fit a sine. Every third point, from point ``fold`` on, is left out for validation."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from memfit.training import Trainer, seed_everything

    def loss(model, batch):  # the summed loss of a batch, and the number of samples that it sums
        x, y = batch
        return ((model(x) - y) ** 2).sum(), len(x)

    x = torch.linspace(-3, 3, 900)[:, None]
    is_test = torch.arange(900) % 3 == fold - 1
    fit, valid = (TensorDataset(x[rows], torch.sin(x[rows])) for rows in (~is_test, is_test))

    seed_everything(ctx.seed)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    trainer = Trainer(model, loss=loss, optimizer=optimizer, checkpoint_dir=ctx.dir, seed=ctx.seed)
    result = trainer.fit(DataLoader(fit, 32, shuffle=True), DataLoader(valid, 300), num_epochs=num_epochs)
    return {"valid_loss": result.history[-1].metrics["valid_loss"]}
