// geometry.h: where everything in a segment lies, computed from a checked copy of its shape.
#pragma once
#include "errors.h"

namespace penstock {

// Where everything lies, computed from a checked copy of the shape: never from offsets that another peer can write.
struct Geometry {
    Shape shape{};
    u64 peers = 0, pool = 0, entries = 0, blocks = 0, block_stride = 0, grants = 0, grants_stride = 0, store = 0,
        channel = 0, lanes = 0, receivers = 0;
    u64 cursors = 0, schema = 0, data = 0, pool_data = 0, trace = 0, total = 0;

    static Geometry of(const Shape& shape) {
        auto refuse = [](const char* what) {
            throw Error(Fault::layout_mismatch, format("segment of an impossible shape: %s", what));
        };
        Geometry g;
        g.shape = shape;
        bool is_pool = shape.kind == static_cast<u32>(SegmentKind::pool);
        bool is_channel = shape.kind == static_cast<u32>(SegmentKind::channel);
        if (!is_pool && !is_channel && shape.kind != static_cast<u32>(SegmentKind::raw)) refuse("kind");
        if (shape.max_peers == 0 || shape.max_peers > MAX_PEERS) refuse("max_peers");
        if (shape.max_blocks > MAX_BLOCKS) refuse("max_blocks");
        if (shape.pool_nbytes > MAX_NBYTES || shape.raw_nbytes > MAX_NBYTES) refuse("nbytes");
        if (shape.page < PAGE || (shape.page & (shape.page - 1)) != 0 || shape.page > (1u << 30)) refuse("page");
        if (shape.latency > 2) refuse("latency");
        if (is_channel) {
            if (shape.lanes == 0 || shape.lanes > MAX_LANES) refuse("lanes");
            if (shape.receivers == 0 || shape.receivers > MAX_RECEIVERS) refuse("receivers");
            auto style = static_cast<ChannelStyle>(shape.style);
            bool is_inbox = style == ChannelStyle::inbox, is_broadcast = style == ChannelStyle::broadcast;
            if (!is_inbox && !is_broadcast && style != ChannelStyle::ring) refuse("style");
            if ((!is_inbox && shape.lanes != 1) || (!is_broadcast && shape.receivers != 1)) refuse("style");
            if (shape.lane_nbytes < PAGE || shape.lane_nbytes > (1ull << 31)) refuse("lane_nbytes");
            if ((shape.lane_nbytes & (shape.lane_nbytes - 1)) != 0) refuse("lane_nbytes");
            if (shape.inline_limit < 64 || shape.inline_limit > shape.lane_nbytes / 4) refuse("inline_limit");
        } else if (shape.lanes != 0 || shape.receivers != 0 || shape.style != static_cast<u32>(ChannelStyle::none)) {
            refuse("lanes");
        }
        if (shape.buckets > (is_pool ? 2 * MAX_BLOCKS : 0) || (shape.buckets & (shape.buckets - 1)) != 0)
            refuse("buckets");
        if (shape.elsewhere > (is_pool && shape.buckets == 0 && shape.granule_nbytes == 0 ? 1 : 0)) refuse("elsewhere");
        bool has_schema = is_channel || shape.elsewhere != 0;
        if (shape.schema_nbytes > (has_schema ? MAX_SCHEMA_NBYTES : 0)) refuse("schema_nbytes");
        if ((is_pool || is_channel) && (shape.max_blocks == 0 || shape.pool_nbytes == 0)) refuse("max_blocks");
        if (shape.granule_nbytes != 0 &&
            (shape.granule_nbytes < PAGE || (shape.granule_nbytes & (shape.granule_nbytes - 1)) != 0 ||
             (shape.pool_nbytes + shape.granule_nbytes - 1) / shape.granule_nbytes > GRANULES))
            refuse("granule_nbytes");
        u64 at = PAGE;
        auto lay = [&at](u64 nbytes) {
            u64 here = at;
            at = round_up(at + nbytes, LINE);
            return here;
        };
        g.peers = lay(sizeof(PeerSlot) * shape.max_peers);
        if (is_pool || is_channel) {
            g.pool = lay(sizeof(PoolHeader));
            g.entries = lay(sizeof(Entry) * shape.max_blocks);
            g.block_stride = sizeof(Block) + round_up(4ull * shape.max_peers, LINE);
            g.blocks = lay(g.block_stride * shape.max_blocks);
            if (shape.has_grants != 0) g.grants_stride = round_up(2ull * shape.max_peers * shape.max_peers, LINE);
            g.grants = lay(g.grants_stride * shape.max_blocks);
            g.store = lay(sizeof(StoreHeader) + 4ull * shape.buckets);
        }
        if (is_channel) {
            g.channel = lay(sizeof(ChannelHeader));
            g.lanes = lay(sizeof(Lane) * shape.lanes);
            g.receivers = lay(sizeof(ReceiverSlot) * shape.receivers);
            g.cursors = lay(sizeof(Cursor) * shape.lanes * shape.receivers);
        }
        if (has_schema) g.schema = lay(shape.schema_nbytes);
        g.data = round_up(at, shape.page);
        g.pool_data = round_up(g.data + shape.lanes * shape.lane_nbytes + shape.raw_nbytes, shape.page);
        g.trace = round_up(g.pool_data + (shape.elsewhere != 0 ? 0 : shape.pool_nbytes), shape.page);
        g.total =
            g.trace + (is_channel ? round_up(g.trace_ring(shape.lanes + shape.receivers) - g.trace, shape.page) : 0);
        return g;
    }
    u64 claimed_at_creation() const { return shape.granule_nbytes != 0 ? pool_data : trace; }
    // Of an end: the lanes' senders first, then the receivers.
    u64 trace_cursor(u32 end) const { return trace + end * sizeof(TraceCursor); }
    u64 trace_ring(u32 end) const {
        u64 cursors = round_up((shape.lanes + shape.receivers) * sizeof(TraceCursor), PAGE);
        return trace + cursors + end * TRACE_EVENTS * sizeof(TraceEvent);
    }
};

}  // namespace penstock
