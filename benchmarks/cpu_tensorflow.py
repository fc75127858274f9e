"""TensorFlow's side of `cpu.py`: the same model and step, in its own environment.

    python benchmarks/cpu_tensorflow.py float32|auto BATCH

"auto" turns on TensorFlow's graph rewrite for CPUs. The model is `models/mlp.py`
written with TensorFlow's ops, the optimizer is RMSprop with optax's defaults, all in
one `tf.function`.
"""

import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf  # noqa: E402

DECAY, EPSILON, RATE = 0.9, 1e-8, 1e-3


def main(mode: str, batch: int) -> None:
    tf.config.optimizer.set_experimental_options(
        {"auto_mixed_precision_onednn_bfloat16": mode == "auto"}
    )
    widths = (784, 4096, 4096, 10)
    tf.random.set_seed(0)
    weights = [
        tf.Variable(tf.random.normal((a, b), stddev=a**-0.5))
        for a, b in zip(widths[:-1], widths[1:], strict=True)
    ]
    biases = [tf.Variable(tf.zeros(b)) for b in widths[1:]]
    variables = weights + biases
    squares = [tf.Variable(tf.zeros_like(v)) for v in variables]
    x = tf.random.uniform((batch, 784))
    y = tf.random.uniform((batch,), 0, 10, tf.int32)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            h = tf.nn.relu(tf.matmul(x, weights[0]) + biases[0])
            h = tf.nn.relu(tf.matmul(h, weights[1]) + biases[1])
            logits = tf.matmul(h, weights[2]) + biases[2]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, variables)
        for v, s, g in zip(variables, squares, grads, strict=True):
            s.assign(DECAY * s + (1 - DECAY) * g * g)
            v.assign_sub(RATE * g * tf.math.rsqrt(s + EPSILON))
        return loss

    for _ in range(3):
        loss = step(x, y)
    print("bench", float(loss), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step(x, y).numpy()
        print("bench", time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
