"""The page that the box serves at `/ui`: static files, which speak to `/admin/v1` and `/v1` as any client does.

Never: Knows a key, asks the controller or the gateway's state, or makes HTML of data.
Begin with site.py (what is sent), then static/app.js (what it does).
"""
