"""A stand-in for Lightning 2: what a Callback sees of a Trainer."""


class Callback:
    def on_train_epoch_start(self, trainer, pl_module):
        pass

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass


class LightningModule:
    def __init__(self):
        self.logged = []

    def log_dict(self, dictionary, prog_bar=False, logger=None, on_step=None, on_epoch=None, reduce_fx="mean", enable_graph=False,
                 sync_dist=False, sync_dist_group=None, add_dataloader_idx=True, batch_size=None, rank_zero_only=False):
        assert on_step and not on_epoch
        self.logged.append(dict(dictionary))


class Trainer:
    def __init__(self, callbacks):
        self.callbacks = callbacks

    def fit(self, module, epochs):
        for steps in epochs:
            for callback in self.callbacks:
                callback.on_train_epoch_start(self, module)
            for i, step in enumerate(steps):
                step()
                for callback in self.callbacks:
                    callback.on_train_batch_end(self, module, None, None, i)
