"""`penstock trace`: a timeline of live processes: each record, each wait, and where a step's time goes.

`live_trace` reads the events that ends of channels write, `timeline` joins them to records and waits, `step_series`
finds steps with their replies, `step_gaps` attributes the time between them, and `trace_file` writes Chrome's trace
format, which Perfetto shows.
"""
