"""What is known of a call's signature before it is captured: by the cache of earlier processes
(`known_calls`, and `recalled_call`, which spares the capture; `recalled_capture` spares the trace
after one), and by the dispatcher of this one (`signature_state`).
"""
