"""Models from packages written elsewhere, as they are: do they plan and train like on one device?"""
