"""Links with which people set a password: once, whoever else has it, and not after a new one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from labeling_app.annotators.invitations import Invitations
from labeling_app.annotators.users import Users
from rlhf.errors import InputError


class UsersAtOnce(Users):
    """Users whose two new passwords are hashed before either of them is stored."""

    both_hashed = threading.Barrier(2)

    def hash(self, password: str) -> str:
        hashed = super().hash(password)
        self.both_hashed.wait(60)
        return hashed


def test_of_two_people_who_use_a_link_at_once_one_sets_the_password(store):
    Users(store).add("ann", "annotator", "the first one")
    invitations = Invitations(UsersAtOnce(store))
    token = invitations.invite_to_reset("ann")

    def accept(password: str) -> str:
        try:
            invitations.accept(token, password)
        except InputError as error:
            return error.problem
        return password

    with ThreadPoolExecutor(2) as pool:
        outcomes = set(pool.map(accept, ("one of them", "the other one")))
    refused = "This link is not valid: it was used, replaced or is older than seven days"
    [password] = outcomes - {refused}
    assert refused in outcomes
    assert Users(store).sign_in("ann", password).user


def test_a_new_password_voids_the_open_link(store):
    users, invitations = Users(store), Invitations(Users(store))
    users.add("ann", "annotator", "the first one")
    token = invitations.invite_to_reset("ann")
    users.reset_password("ann", "the second one")
    with pytest.raises(InputError, match="This link is not valid"):
        invitations.accept(token, "of whoever found the link")
    assert users.sign_in("ann", "the second one").user


def test_somebody_who_was_added_meanwhile_is_no_longer_invited(store):
    users, invitations = Users(store), Invitations(Users(store))
    token = invitations.invite("ann", "annotator")
    users.add("ann", "annotator", "long enough")
    assert invitations.all() == []
    with pytest.raises(InputError, match="This link is not valid"):
        invitations.find(token)
