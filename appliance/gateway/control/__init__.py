"""Handles requests that the controller answers: relayed, scraped, or made on behalf of a response.

Never: It answers nothing from the gateway's own knowledge but /metrics.
Begin with controller_call.py, then relay.py.
"""
