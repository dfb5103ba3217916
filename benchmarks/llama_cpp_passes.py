"""Times llama.cpp in a process of its own: llama_cpp_passes.py MODEL.gguf pass|prefill ROWS THREADS

`pass`: median milliseconds of one batch of ROWS tokens, all with logits, after 128 tokens.
`prefill`: milliseconds of ROWS tokens from an empty cache, the best of three, last logits only.
Runs under an interpreter with llama-cpp-python; prints one JSON number.
"""

import ctypes
import json
import statistics
import sys
import time

import llama_cpp

CONTEXT = 128


def decode(context, tokens, position, all_logits):
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = all_logits or i == len(tokens) - 1
    start = time.perf_counter()
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_synchronize(context)
    seconds = time.perf_counter() - start
    llama_cpp.llama_batch_free(batch)
    if status:
        raise SystemExit(f"llama_decode returned {status}")
    return seconds * 1e3


def open_context(path, threads):
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 1024, 512, 512
    options.n_threads = options.n_threads_batch = threads
    return llama_cpp.llama_init_from_model(model, options)


def main():
    path, kind, rows, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    context = open_context(path, threads)
    memory = llama_cpp.llama_get_memory(context)
    times = []
    if kind == "prefill":
        for _ in range(3):
            times.append(decode(context, [100 + i for i in range(rows)], 0, False))
            llama_cpp.llama_memory_seq_rm(memory, 0, 0, -1)
        print(json.dumps(min(times)))
        return
    decode(context, list(range(100, 100 + CONTEXT)), 0, False)
    for _ in range(15):
        times.append(decode(context, list(range(200, 200 + rows)), CONTEXT, True))
        llama_cpp.llama_memory_seq_rm(memory, 0, CONTEXT, -1)
    print(json.dumps(statistics.median(times)))


main()
