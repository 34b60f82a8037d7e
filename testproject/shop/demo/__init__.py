"""The shop under load: `manage.py mq_demo` puts these together.

| module         | its thought                                                         |
|----------------|---------------------------------------------------------------------|
| `processes.py` | the web server and the workers: started, watched, ended              |
| `leash.py`     | they end even if the demo is killed                                  |
| `customers.py` | several clients that order at once, over HTTP                        |
| `ledger.py`    | what is in the tables and on disk when all is done: does it add up?  |
| `screen.py`    | what is shown meanwhile                                              |
"""
