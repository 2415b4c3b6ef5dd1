//! Enums that are written as texts.

/// An enum whose values are words of a text column.
macro_rules! text_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $text)] $variant,)*
        }

        impl $name {
            /// Every value, in a fixed order.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];

            /// The word in the file.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text),* }
            }

            /// The number of the value: its place in [`Self::ALL`].
            #[must_use]
            pub const fn id(self) -> u8 {
                self as u8
            }

            /// The value of a number; `None` for a number that no value has.
            #[must_use]
            pub fn from_id(id: u64) -> Option<Self> {
                Self::ALL.get(usize::try_from(id).ok()?).copied()
            }

            /// The value of a word; `None` for a word that this schema does not have.
            #[must_use]
            pub fn parse(word: &str) -> Option<Self> {
                match word { $($text => Some($name::$variant),)* _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

pub(crate) use text_enum;

#[cfg(test)]
mod tests {
    use crate::{Category, EventName};

    #[test]
    fn words_round_trip() {
        for event in EventName::ALL {
            assert_eq!(EventName::parse(event.as_str()), Some(*event));
            assert_eq!(EventName::from_id(event.id().into()), Some(*event));
        }
        assert_eq!(EventName::parse("alloca"), None);
        assert_eq!(Category::from_id(10), None);
        assert_eq!(Category::parse("(none)"), Some(Category::None));
    }
}
