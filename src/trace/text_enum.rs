//! Enums that map each value to a text and a number.

/// Declares an enum with a text and a doc comment for each value; `[default]` precedes the default. The text
/// is used in files. The number, the value's position in the declaration, is used in events and in the Python
/// tracer. Values may be appended but never reordered.
macro_rules! text_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[doc = $vdoc:literal])* $([$mark:ident])? $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name {
            $($(#[doc = $vdoc])* $(#[$mark])? #[serde(rename = $text)] $variant,)*
        }

        impl $name {
            /// All values, in the order of their numbers.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];

            /// Returns the text of the value.
            #[inline(always)]
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                const TEXTS: &[&str] = &[$($text),*];
                TEXTS[self as usize]
            }

            /// Returns the meaning of the value in one sentence.
            #[must_use]
            pub fn about(self) -> &'static str {
                match self { $($name::$variant => concat!($($vdoc),*)),* }.trim()
            }

            /// Returns the number of the value, its index in [`Self::ALL`].
            #[must_use]
            pub const fn id(self) -> u8 {
                self as u8
            }

            /// Returns the value with this number, or `None` if no value has it.
            #[must_use]
            pub fn from_id(id: u64) -> Option<Self> {
                Self::ALL.get(usize::try_from(id).ok()?).copied()
            }

            /// Returns the value with this text, or `None` if no value has it.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                match text { $($text => Some($name::$variant),)* _ => None }
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
    fn texts_and_numbers_come_back_as_their_values() {
        for event in EventName::ALL {
            assert_eq!(EventName::parse(event.as_str()), Some(*event));
            assert_eq!(EventName::from_id(event.id().into()), Some(*event));
        }
        assert_eq!(EventName::Oom.about(), "The allocator could not serve a request.");
        assert_eq!(EventName::parse("alloca"), None);
        assert_eq!(Category::from_id(9), Some(Category::None));
        assert_eq!(Category::from_id(Category::ALL.len() as u64), None);
        assert_eq!(Category::parse("(none)"), Some(Category::None));
    }
}
