"""x"""
class Watch:
    def __init__(self, world, rare): pass
    def done(self): pass
