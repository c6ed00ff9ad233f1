"""What goes over the channels of running processes: bytes by message and by field, and how few of them are new.

`live_capture` and `capture_file` say where frames come from, `frame_fields` takes them apart, `channel_stats` counts,
`channel_report` prints. Leaves to the native core: reading a channel without being noticed.
"""
