"""Fixtures that every part of the suite shares."""
