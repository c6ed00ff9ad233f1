// bindings_engine.cpp: the module penstock.engine._native: the block cache of the core, layers of CPU workers, pixels,
// chunks of streamed answers.
// What is wrong with an argument is std::invalid_argument here, which nanobind makes a ValueError.
#include "bindings_engine.h"

NB_MODULE(_native, m) {
    m.doc() =
        "The engine's native code: KV-cache blocks and their prefix hashes, layers of a model on CPUs, the pixels "
        "of videos, chunks of streamed answers, records of fatal signals.";
    penstock::engine::bind_block_cache(m);
    penstock::engine::bind_chunk_sender(m);
    penstock::engine::bind_fatal_signals(m);
    penstock::engine::bind_file_mapping(m);
    penstock::engine::bind_paged_attention(m);
    penstock::engine::bind_packed_linear(m);
    penstock::engine::bind_rank_memory(m);
    penstock::engine::bind_decoder_layer(m);
    penstock::engine::bind_pixels(m);
    penstock::engine::bind_rms_norm(m);
    penstock::engine::bind_rotary(m);
    penstock::engine::bind_table_writer(m);
    penstock::engine::bind_token_choice(m);
}
