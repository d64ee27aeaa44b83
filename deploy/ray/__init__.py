"""`dubito ray`: the server as replicas of a Ray Serve application, on one node or many."""
