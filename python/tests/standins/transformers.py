"""A stand-in for transformers 5: what a TrainerCallback sees of a Trainer, in its order."""


class TrainerCallback:
    def on_train_begin(self, args, state, control, **kwargs):
        pass

    def on_log(self, args, state, control, **kwargs):
        pass

    def on_train_end(self, args, state, control, **kwargs):
        pass


class CallbackHandler:
    def __init__(self, callbacks):
        self.callbacks = []
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback):
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def call_event(self, event, args, state, control, **kwargs):
        for callback in self.callbacks:
            getattr(callback, event)(args, state, control, model=None, processing_class=None, optimizer=None, lr_scheduler=None,
                                     train_dataloader=None, eval_dataloader=None, **kwargs)


class TrainerState:
    def __init__(self):
        self.log_history = []


class Trainer:
    def __init__(self, reporting=(), callbacks=None):
        self.state = TrainerState()
        self.callback_handler = CallbackHandler(list(reporting) + list(callbacks or ()))

    def add_callback(self, callback):
        self.callback_handler.add_callback(callback)

    def log(self, logs):
        self.state.log_history.append({**logs, "step": len(self.state.log_history)})
        self.callback_handler.call_event("on_log", None, self.state, None, logs=logs)

    def train(self, steps):
        self.callback_handler.call_event("on_train_begin", None, self.state, None)
        for step in steps:
            step()
            self.log({"loss": 1.0})
        self.callback_handler.call_event("on_train_end", None, self.state, None)
