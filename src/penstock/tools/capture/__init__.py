"""`penstock measure`: bytes on channels of running processes, by message and field, and the share that is new.

`live_capture` reads live channels and `capture_file` recordings, `frame_fields` splits frames into fields,
`channel_stats` counts, and `channel_report` prints. The native tap reads a channel without disturbing it.
"""
