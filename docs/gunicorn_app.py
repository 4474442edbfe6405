"""Try it: gunicorn -w 4 --preload gunicorn_app:app — the workers admit 100 requests a minute between them."""

from sidecar import Client, Limit

client = Client()
per_minute = Limit("requests_per_min", 100, per="1m")


def app(environ, start_response):
    decision = client.hit(per_minute, environ["REMOTE_ADDR"])
    start_response("200 OK" if decision else "429 Too Many Requests", [("Content-Length", "0")])
    return []
